"""MOON (Li, He and Song 2021): pull representations toward the received model's, away from the silo's last model's."""

from __future__ import annotations

from typing import Literal, cast

from pydantic import Field
from torch import Tensor

from silotune.methods import (
    HEAD,
    Mix,
    Phase,
    Step,
    SupervisedOptions,
    mean_over_rows,
    model_contrast,
    previous,
    received,
)
from silotune.methods.fedavg import FedAvg


class MOONOptions(SupervisedOptions):
    """The options of MOON."""

    mu: float = Field(default=1.0, ge=0, description="the weight of the contrastive loss")
    tau: float = Field(default=0.5, gt=0, description="temperature of the contrastive loss")
    representation: Literal["mean", "first"] = Field(default="mean", description="pooling of the compared states")


class MOON(FedAvg):
    """Loss: `CE − mu·log( e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ}) )` (their eqs. 3, 4).

    z_glob and z_prev come from the received adapters and from those of the silo's last participation; in its first
    one they are the same model. No projection head is added: the pooled states are compared.
    """

    name = "moon"
    paper = "Li et al. 2021, Model-Contrastive Federated Learning"
    Options = MOONOptions

    @property
    def remembers(self) -> tuple[str, ...]:
        """The adapters, as `previous` anchors."""
        return tuple(self.adapters)

    def phases(self) -> list[Phase]:
        """One phase with two anchors, the received and the previous model."""
        anchors: dict[str, Mix] = {
            "received": {received(name): weight for name, weight in self.mix.items()},
            "previous": {previous(name): weight for name, weight in self.mix.items()},
        }
        trains = (*self.adapters, HEAD)
        return [Phase("train", trains=trains, views={"full": self.mix, **anchors}, loss=self.loss)]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Cross-entropy plus the contrastive loss."""
        options = cast(MOONOptions, self.options)
        z, z_glob, z_prev = (step.views[view][options.representation] for view in ("full", "received", "previous"))
        cross_entropy = step.cross_entropy("full")
        contrastive = model_contrast(z, z_glob, z_prev, options.tau)
        step.log(cross_entropy=cross_entropy, contrastive=contrastive)
        return cross_entropy + options.mu * contrastive
