"""FedDyn (Acar et al. 2021): silos' losses are changed so that their minima agree with the minimum of the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from pydantic import Field
from torch import Tensor

from silotune.methods import (
    Part,
    Phase,
    Scope,
    Server,
    State,
    Step,
    SupervisedOptions,
    Tensors,
    Update,
    ZerosLike,
    copies,
    mean_over_rows,
    private,
    proximal,
)
from silotune.methods.fedavg import FedAvg


def gradient_of(part: str) -> str:
    """Return the name of the part that holds `∇L_k(θ_k)`, a silo's gradient at the end of its last round."""
    return f"{part}_gradient"


class FedDynOptions(SupervisedOptions):
    """The options of FedDyn."""

    alpha: float = Field(default=0.01, gt=0, description="α, the weight of the dynamic regularizer")


class FedDyn(FedAvg):
    """FedDyn by its Algorithm 1; a private head is trained on the plain loss."""

    name = "feddyn"
    paper = "Acar et al. 2021, Federated Learning Based on Dynamic Regularization"
    Options = FedDynOptions
    defaults = {"aggregation": "uniform"}
    aggregations = ("uniform",)

    @property
    def regularized(self) -> list[str]:
        """The parts θ: the shared ones."""
        return [name for name, part in super().parts().items() if part.scope is Scope.SHARED]

    def parts(self) -> dict[str, Part]:
        """Return θ and the head, and for each shared part the silo's gradient, which starts at 0."""
        parts = super().parts()
        for name in self.regularized:
            parts[gradient_of(name)] = private(ZerosLike(parts[name].module))
            parts[name] = replace(parts[name], aggregation=self.server)
        return parts

    def phases(self) -> list[Phase]:
        """Return the training of θ, then the gradient at its end."""
        new = {gradient_of(part): partial(self.new_gradient, part) for part in self.regularized}
        return [*super().phases(), copies("gradient", new)]

    @property
    def alpha(self) -> float:
        """Return α."""
        return cast(FedDynOptions, self.options).alpha

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Return `L_k(θ) − <∇L_k(θ_k), θ> + (α/2)·‖θ − θ_received‖²`."""
        total = step.cross_entropy("full")
        for part in self.regularized:
            total = total + step.without_rows(self.alpha / 2 * proximal(step.state[part], step.received[part]))
            for name, gradient in step.state[gradient_of(part)].items():
                total = total + step.without_rows(-(gradient * step.state[part][name]).sum())
        return total

    def new_gradient(self, part: str, state: State, received: State) -> Tensors:
        """Return `∇L_k(θ_k) − α·(θ_k − θ_received)`, the gradient at the new θ_k."""
        old, before = state[gradient_of(part)], received[part]
        return {name: old[name] - self.alpha * (new - before[name]) for name, new in state[part].items()}

    def server(self, updates: Sequence[Update], server: Server) -> Tensors:
        """Return `mean(θ_k) − h/α` with `h ← h − α·Σ(θ_k − θ)/m`; m silos in all, of which some were sampled."""
        alpha, new = self.alpha, {}
        for name, before in server.before.items():
            thetas = torch.stack([update.part(server.part)[name] for update in updates]).double()
            h = server.state.get(name, torch.zeros_like(before, dtype=torch.float64))
            h = h - alpha * (thetas - before.double()).sum(0) / server.silos
            server.state[name], new[name] = h, thetas.mean(0) - h / alpha
        return new
