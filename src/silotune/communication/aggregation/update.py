"""What one silo sent, and how far it moved the shared parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from silotune.core.norms import clipping_factor, iter_delta, total_norm
from silotune.core.tensors import Tensors


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
    """`‖θ_k − θ‖₂` over all tensors: of the change, not of the weights."""
    return total_norm((change for _, change in iter_delta(before, tensors)), "l2")


def clipped(update: Update, before: Tensors, limit: float) -> Update:
    """The update with its change scaled down to a norm of `limit` at most: `θ + Δ·min(1, limit / ‖Δ‖)`.

    Norm clipping at the coordinator (Sun et al. 2019, "Can You Really Backdoor Federated Learning?", section 4). An
    update within the limit is kept to the bit.
    """
    factor = clipping_factor(change_norm(update.tensors, before), limit)
    if factor == 1:
        return update
    tensors = {
        name: (before[name].double() + change * factor).to(update.tensors[name].dtype)
        for name, change in iter_delta(before, update.tensors)
    }
    return replace(update, tensors=tensors)
