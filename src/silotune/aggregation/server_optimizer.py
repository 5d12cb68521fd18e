"""Take the coordinator's step along the mean change: momentum, Nesterov, Adagrad, Adam or Yogi.

FedAvgM (Hsu et al. 2019); Nesterov momentum (DiLoCo, Douillard et al. 2023, Algorithm 1); FedAdagrad, FedAdam, FedYogi
(Reddi et al. 2021, Algorithm 2, without bias correction). They combine with any method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from silotune.core.tensors import Tensors

_SecondMoment = Callable[[Tensor, Tensor, float], Tensor]

SECOND_MOMENTS: dict[str, _SecondMoment] = {
    "adagrad": lambda v, square, beta2: v + square,
    "adam": lambda v, square, beta2: beta2 * v + (1 - beta2) * square,
    "yogi": lambda v, square, beta2: v - (1 - beta2) * square * torch.sign(v - square),
}
"""The v of Algorithm 2: (v, Δ², β₂) → new v."""


@dataclass
class ServerOptimizer:
    """`Δ = mean − x`; `m ← β₁·m + (1 − β₁)·Δ`; `x ← x + lr·m / (√v + τ)`.

    `none` adopts the mean (lr 1) or goes `lr` of the way; `avgm` is momentum without the (1 − β₁) and without v;
    `nesterov` looks ahead of that: `m ← β₁·m + Δ`; `x ← x + lr·(Δ + β₁·m)`.

    Args:
        name: none, avgm, nesterov, adam, yogi or adagrad.
        lr: the server's learning rate.
        beta1: momentum.
        beta2: decay of the second moment.
        tau: adaptivity; v starts at τ².
        state: `{"m/part/tensor": …, "v/part/tensor": …}`, float32, kept in checkpoints.
    """

    name: str = "none"
    lr: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    state: Tensors = field(default_factory=dict)

    @property
    def adopts(self) -> bool:
        """Whether the aggregate replaces the shared parts as it is."""
        return self.name == "none" and self.lr == 1

    def step(self, current: Tensors, mean: Tensors) -> Tensors:
        """Return the new tensors of those in `mean`, by "part/tensor" name."""
        if self.adopts:
            return mean
        return {name: self._step(name, current[name], mean[name]) for name in current if name in mean}

    def _step(self, name: str, x: Tensor, mean: Tensor) -> Tensor:
        delta = mean - x
        if self.name == "none":
            return x + self.lr * delta
        m = self.state.get(f"m/{name}", torch.zeros_like(x))
        if self.name in ("avgm", "nesterov"):
            m = self.beta1 * m + delta
            self.state[f"m/{name}"] = m
            return x + self.lr * (m if self.name == "avgm" else delta + self.beta1 * m)
        m = self.beta1 * m + (1 - self.beta1) * delta
        v = self.state.get(f"v/{name}", torch.full_like(x, self.tau**2))
        v = SECOND_MOMENTS[self.name](v, delta.square(), self.beta2)
        self.state |= {f"m/{name}": m, f"v/{name}": v}
        return x + self.lr * m / (v.sqrt() + self.tau)
