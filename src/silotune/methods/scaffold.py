"""SCAFFOLD (Karimireddy et al. 2020): control variates take the drift of unlike silos out of their local steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from silotune.methods import (
    Part,
    Phase,
    Scope,
    Server,
    StartingTensors,
    State,
    Step,
    Tensors,
    Update,
    ZerosLike,
    copies,
    mean_over_rows,
    private,
    shared,
)
from silotune.methods.fedavg import FedAvg


def common(part: str) -> str:
    """Return the name of the part that holds c, the coordinator's control variate of a part."""
    return f"{part}_c"


def own(part: str) -> str:
    """Return the name of the part that holds c_i, a silo's control variate of a part."""
    return f"{part}_c_own"


class SCAFFOLD(FedAvg):
    """SCAFFOLD with option II; `server.lr` is the global step size η_g. A private head has no control variate."""

    name = "scaffold"
    paper = "Karimireddy et al. 2020, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning"
    defaults = {"train.optimizer": "sgd", "aggregation": "uniform"}
    optimizers = ("sgd",)

    @property
    def controlled(self) -> list[str]:
        """The parts x that have control variates: the shared ones."""
        parts = super().parts().items()
        return [
            name for name, part in parts if part.scope is Scope.SHARED and getattr(part.module, "has_tensors", True)
        ]

    def parts(self) -> dict[str, Part]:
        """Return x and the head; for each shared part c, which silos receive, and c_i, which stays. Both start at 0.

        The part of c holds c in a broadcast, and c + Δc_i in an update.
        """
        parts = super().parts()
        for name in self.controlled:
            zeros = ZerosLike(parts[name].module)
            parts |= {common(name): shared(zeros, aggregation=self.server), own(name): private(zeros)}
        return parts

    def phases(self) -> list[Phase]:
        """Return K steps on x, then the new control variates."""
        new: dict[str, StartingTensors] = {}  # in this order: `control` reads what `mean_gradient` puts in c's place
        for part in self.controlled:
            new |= {common(part): partial(self.mean_gradient, part), own(part): partial(self.control, part)}
        return [*super().phases(), copies("control", new)]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Return the cross-entropy plus `<c − c_i, y>`, whose gradient corrects each step to `g(y) − c_i + c`."""
        correction = [
            ((step.state[common(part)][name] - c_i) * step.state[part][name]).sum()
            for part in self.controlled
            for name, c_i in step.state[own(part)].items()
        ]
        cross_entropy = step.cross_entropy("full")
        step.log(cross_entropy=cross_entropy)
        return cross_entropy + step.without_rows(torch.stack(correction or [torch.zeros(())]).sum())

    def mean_gradient(self, part: str, state: State, received: State) -> Tensors:
        """Return `(x − y_i)/(K·η)`, which is c + Δc_i; it is sent in the place of c."""
        return {name: (received[part][name] - y) / self.train.rate_sums["train"] for name, y in state[part].items()}

    def control(self, part: str, state: State, received: State) -> Tensors:
        """Return `c_i − c + (x − y_i)/(K·η)`, the silo's new control variate."""
        new, old = state[common(part)], received[common(part)]
        return {name: c_i - old[name] + new[name] for name, c_i in state[own(part)].items()}

    @staticmethod
    def server(updates: Sequence[Update], server: Server) -> Tensors:
        """Return `c + Σ Δc_i / N` over the round's silos, with the number N of all silos."""
        sums = {name: torch.zeros_like(c, dtype=torch.float64) for name, c in server.before.items()}
        for update in updates:
            for name, tensor in update.part(server.part).items():
                sums[name] += tensor.double() - server.before[name].double()
        return {name: server.before[name].double() + total / server.silos for name, total in sums.items()}
