"""Clipping of what a silo sends: the bound that makes its noise mean something."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from silotune.parts import Tensors
from silotune.uplink.draws import Draws

Norm = Literal["l1", "l2"]
_ROUNDING = 1 + 1e-12  # the scaled norm, summed in float64, is then at most the bound and never a digit above


def norm_of(change: Tensors, norm: Norm) -> float:
    """`Σ|x|` or `√Σx²` over all tensors together, in float64."""
    if norm == "l1":
        return math.fsum(float(tensor.double().abs().sum()) for tensor in change.values())
    return math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in change.values()))


def scaled_down(change: Tensors, bound: float, norm: Norm) -> Tensors:
    """`Δ·min(1, C / ‖Δ‖)` over all tensors together, float64; within the bound as it is."""
    change = {name: tensor.double() for name, tensor in change.items()}
    found = norm_of(change, norm)
    if found <= bound:
        return change
    factor = bound / (found * _ROUNDING)
    return {name: tensor * factor for name, tensor in change.items()}


@dataclass(frozen=True)
class Clip:
    """Scales the change down to a norm of `bound`; two changes are then at most `2·bound` apart."""

    bound: float
    norm: Norm

    def __call__(self, change: Tensors, draws: Draws) -> Tensors:
        """See `uplink.base.Step`."""
        return scaled_down(change, self.bound, self.norm)
