"""Compute the change of a silo's tensors, its norm, and its clipped form, all in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal

from torch import Tensor

from silotune.core.tensors import Tensors

Norm = Literal["l1", "l2"]

_ROUNDING = 1 + 1e-12  # keeps the norm of the clipped update, summed in float64, at or below the bound


def total_norm(tensors: Iterable[Tensor], norm: Norm) -> float:
    """Compute `Σ|x|` or `√Σx²` over all tensors together, in float64.

    Args:
        tensors: tensors of any shape; an iterator is consumed one by one.
        norm: `l1` or `l2`.
    """
    if norm == "l1":
        return math.fsum(float(tensor.double().abs().sum()) for tensor in tensors)
    return math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in tensors))


def clipping_factor(norm: float, bound: float) -> float:
    """Return `min(1, C / ‖Δ‖)`, exactly 1 if the norm is within the bound."""
    return 1.0 if norm <= bound else bound / (norm * _ROUNDING)


def clip_to_norm(change: Tensors, bound: float, norm: Norm) -> Tensors:
    """Return `Δ·min(1, C / ‖Δ‖)` in float64, with the norm over all tensors together."""
    change = {name: tensor.double() for name, tensor in change.items()}
    factor = clipping_factor(total_norm(change.values(), norm), bound)
    return change if factor == 1 else {name: tensor * factor for name, tensor in change.items()}


def change_of(before: Tensors, after: Tensors) -> Tensors:
    """Return the update `θ_k − θ` in float64.

    Args:
        before: θ, the tensors before training.
        after: θ_k, the trained tensors; their names are a subset of `before`'s.
    """
    return dict(iter_change(before, after))


def iter_change(before: Tensors, after: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield `(name, θ_k − θ)` in float64, one tensor at a time, so that the update is never in memory as a whole."""
    for name, tensor in after.items():
        yield name, tensor.double() - before[name].double()
