"""What one silo sent, and how far it moved the shared parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from silotune.parts import Tensors


@dataclass(frozen=True)
class Update:
    """What one silo sent in one round: its shared tensors and the number of rows it trained on."""

    silo: str
    tensors: Tensors
    rows: int


Aggregation = Callable[[Iterable[Update]], Tensors]
"""From updates in silo-name order, one at least."""


def in_name_order(updates: Iterable[Update], silos: Sequence[str]) -> Iterator[Update]:
    """Updates as they arrive, given on in silo-name order: each as soon as no other of these silos can come before it.

    What comes in order is not kept. A silo that sends nothing holds back those behind it until all have arrived.
    """
    turns = iter(sorted(silos))
    turn = next(turns, None)
    waiting: dict[str, Update] = {}
    for update in updates:
        waiting[update.silo] = update
        del update
        while turn in waiting:
            yield waiting.pop(turn)
            turn = next(turns, None)
    yield from (waiting[name] for name in sorted(waiting))


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
