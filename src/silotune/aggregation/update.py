"""Define `Update`, the tensors a silo sends in a round, and aggregations, which combine updates to new shared parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from silotune.core.tensors import State, Tensors, clipping_factor, iter_change, total_norm


@dataclass(frozen=True)
class Update:
    """A silo's shared tensors after a round, by "part/tensor" name, and the number of its training rows.

    `received` holds the tensors of the broadcast that the silo got, where these are not the coordinator's own; `score`
    the number that the aggregation reads (`BroadcastAggregation.reads`).
    """

    silo: str
    tensors: Tensors
    rows: int
    received: Tensors | None = None
    score: float | None = None

    def before(self, shared: Tensors) -> Tensors:
        """Return the tensors from which the silo started, where the coordinator's own are `shared`."""
        return shared if self.received is None else self.received

    def part(self, name: str) -> Tensors:
        """Return the tensors of one part by their own names; empty if the silo did not send the part."""
        prefix = f"{name}/"
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}


Aggregation = Callable[[Iterable[Update]], Tensors]
"""Updates in silo-name order, at least one → the aggregated tensors."""


@dataclass
class Server:
    """The coordinator's view of a round, for a part with an aggregation of its own.

    Args:
        part: the part's name.
        before: the part's tensors in the round's broadcast, by name.
        shared: all shared parts in the round's broadcast.
        silos: the number of all silos of the run, sampled or not.
        state: tensors that the aggregation keeps from round to round, empty at first. Give them new values, do not
            change tensors in place. They are in checkpoints and in `state_sha256`.
    """

    part: str
    before: Tensors
    shared: State
    silos: int
    state: Tensors = field(default_factory=dict)


PartAggregation = Callable[[Sequence[Update], Server], Tensors]
"""The round's updates in silo-name order, at least one, and the server → new tensors of one part, by name.

Tensors that it does not name stay. An update holds all parts that the silo sent, so that a part may be computed from
others. Example, the mean over all silos, where those that were not sampled have changed nothing:

    def mean_over_all(updates, server):
        sums = {name: torch.zeros_like(tensor) for name, tensor in server.before.items()}
        for update in updates:
            for name, tensor in update.part(server.part).items():
                sums[name] += tensor - server.before[name]
        return {name: server.before[name] + total / server.silos for name, total in sums.items()}
"""


def in_name_order(updates: Iterable[Update], silos: Sequence[str]) -> Iterator[Update]:
    """Yield arriving updates in silo-name order, each as early as possible.

    Updates that arrive in order are not kept. A silo that sends nothing delays the silos after it until the last
    arrival.
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
    """Return `‖θ_k − θ‖₂` over all tensors: the norm of the change."""
    return total_norm((change for _, change in iter_change(before, tensors)), "l2")


def clipped(update: Update, before: Tensors, limit: float) -> Update:
    """Return the update with its change clipped to an L2 norm of `limit`: `θ + Δ·min(1, limit / ‖Δ‖)`.

    Norm clipping at the coordinator (Sun et al. 2019, "Can You Really Backdoor Federated Learning?", section 4). An
    update within the limit stays bit for bit.
    """
    before = update.before(before)
    factor = clipping_factor(change_norm(update.tensors, before), limit)
    if factor == 1:
        return update
    tensors = {
        name: (before[name].double() + change * factor).to(update.tensors[name].dtype)
        for name, change in iter_change(before, update.tensors)
    }
    return replace(update, tensors=tensors)
