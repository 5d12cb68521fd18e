"""What one silo sent, and how far it moved the shared parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from silotune.parts import Tensors


@dataclass(frozen=True)
class Update:
    """What one silo sent in one round: its shared tensors and the number of rows it trained on."""

    silo: str
    tensors: Tensors
    rows: int


Aggregation = Callable[[Sequence[Update]], Tensors]


def change_norm(tensors: Tensors, before: Tensors) -> float:
    """`‖θ_k − θ‖₂` over all tensors, in float64: of the change, not of the weights."""
    return math.sqrt(sum(float((t.double() - before[name].double()).square().sum()) for name, t in tensors.items()))


def clipped(update: Update, before: Tensors, limit: float) -> Update:
    """The update with its change scaled down to a norm of `limit` at most: `θ + Δ·min(1, limit / ‖Δ‖)`.

    Norm clipping at the coordinator (Sun et al. 2019, "Can You Really Backdoor Federated Learning?", section 4). An
    update within the limit is kept to the bit.
    """
    norm = change_norm(update.tensors, before)
    if norm <= limit:
        return update
    factor = limit / norm
    tensors = {
        name: (before[name].double() + factor * (tensor.double() - before[name].double())).to(tensor.dtype)
        for name, tensor in update.tensors.items()
    }
    return replace(update, tensors=tensors)
