"""The length of a change, over all its tensors together, and scaling it down to a bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal

from torch import Tensor

from silotune.core.tensors import Tensors

Norm = Literal["l1", "l2"]

_ROUNDING = 1 + 1e-12  # the scaled norm, summed in float64, is then at most the bound and never a digit above


def total_norm(tensors: Iterable[Tensor], norm: Norm) -> float:
    """`Σ|x|` or `√Σx²` over all tensors together, in float64; they may come one by one."""
    if norm == "l1":
        return math.fsum(float(tensor.double().abs().sum()) for tensor in tensors)
    return math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in tensors))


def clipping_factor(found: float, bound: float) -> float:
    """`min(1, C / ‖Δ‖)`: 1 within the bound, exactly."""
    return 1.0 if found <= bound else bound / (found * _ROUNDING)


def clip_to_norm(change: Tensors, bound: float, norm: Norm) -> Tensors:
    """`Δ·min(1, C / ‖Δ‖)` over all tensors together, float64; within the bound as it is."""
    change = {name: tensor.double() for name, tensor in change.items()}
    factor = clipping_factor(total_norm(change.values(), norm), bound)
    return change if factor == 1 else {name: tensor * factor for name, tensor in change.items()}


def delta(before: Tensors, tensors: Tensors) -> Tensors:
    """`θ_k − θ` in float64."""
    return dict(iter_delta(before, tensors))


def iter_delta(before: Tensors, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """`θ_k − θ`, tensor by tensor, in float64: never all at once."""
    for name, tensor in tensors.items():
        yield name, tensor.double() - before[name].double()
