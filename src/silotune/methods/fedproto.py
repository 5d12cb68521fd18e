"""FedProto (Tan et al. 2022): silos share no weights, only the mean representation of each class: its prototype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from silotune.methods import (
    CLASSES,
    WIDTH,
    Part,
    Phase,
    Server,
    State,
    Step,
    SupervisedOptions,
    Table,
    Tensors,
    Update,
    gather,
    mean_over_rows,
    shared,
)
from silotune.methods.local import Local

TABLE = "prototypes"


class FedProtoOptions(SupervisedOptions):
    """The options of FedProto."""

    lam: float = Field(default=1.0, ge=0, description="λ, the weight of the distance to the prototypes")
    representation: Literal["mean", "first"] = Field(default="mean", description="pooling of the states for prototypes")


class FedProto(Local):
    """FedProto by its Algorithm 1: silos of one task keep their models and share prototypes of its classes."""

    name = "fedproto"
    paper = "Tan et al. 2022, FedProto: Federated Prototype Learning across Heterogeneous Clients"
    Options = FedProtoOptions
    kinds = ("classification",)

    def parts(self) -> dict[str, Part]:
        """Return the silo's model, and the table of prototypes with the number of rows that each is the mean of."""
        table = Table(prototypes=(CLASSES, WIDTH), rows=(CLASSES,))
        return {**super().parts(), TABLE: shared(table, aggregation=mean_by_class)}

    def phases(self) -> list[Phase]:
        """Return the training, then a pass over the silo's rows that computes its prototypes (eq. 3)."""
        (train,) = super().phases()
        return [train, gather("gather", train.views, {TABLE: self.gathered}, start={TABLE: empty})]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Return the cross-entropy plus λ times the squared distance of rows to their class's prototype (eq. 5).

        A class without a prototype so far adds 0.
        """
        options, table = cast(FedProtoOptions, self.options), step.received[TABLE]
        z = step.views["full"][options.representation]
        labels = step.batch.labels.to(z.device)
        distances = (z - table["prototypes"][labels]).square().mean(-1)
        distance = torch.where(table["rows"][labels] > 0, distances, 0.0).mean()
        cross_entropy = step.cross_entropy("full")
        step.log(cross_entropy=cross_entropy, distance=distance)
        return cross_entropy + options.lam * distance

    def gathered(self, step: Step) -> Tensors:
        """Return the means of each class over this batch and the ones before."""
        z = step.views["full"][cast(FedProtoOptions, self.options).representation]
        mean, rows = step.state[TABLE]["prototypes"], step.state[TABLE]["rows"]
        of_class = nn.functional.one_hot(step.batch.labels.to(z.device), len(rows)).to(mean)
        total = rows + of_class.sum(0)
        change = of_class.T @ z.to(mean) - of_class.sum(0)[:, None] * mean
        return {"prototypes": mean + change / total.clamp(min=1)[:, None], "rows": total}


def empty(state: State, received: State) -> Tensors:
    """Return a table without rows."""
    return {name: torch.zeros_like(tensor) for name, tensor in received[TABLE].items()}


def mean_by_class(updates: Sequence[Update], server: Server) -> Tensors:
    """Return per class the mean of the silos' prototypes, weighted by their rows (eq. 6); others stay."""
    parts = [update.part(server.part) for update in updates]
    rows = torch.stack([tensors["rows"] for tensors in parts]).double().clamp(min=0)
    sums = (rows[:, :, None] * torch.stack([tensors["prototypes"] for tensors in parts])).sum(0)
    before, total = server.before, rows.sum(0)
    means = torch.where(total[:, None] > 0, sums / total[:, None], before["prototypes"].double())
    return {"prototypes": means, "rows": torch.where(total > 0, total, before["rows"].double())}
