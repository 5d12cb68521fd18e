"""The length of a change, over all its tensors together, and scaling it down to a bound."""

from __future__ import annotations

import math
from typing import Literal

from silotune.parts import Tensors

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


def change_from(before: Tensors, tensors: Tensors) -> Tensors:
    """`θ_k − θ`, tensor by tensor, in float64."""
    return {name: tensor.double() - before[name].double() for name, tensor in tensors.items()}
