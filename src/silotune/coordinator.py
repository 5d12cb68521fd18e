"""The coordinator: samples silos, broadcasts the shared parts, checks what comes back and aggregates it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from silotune.aggregation import Aggregation, Update
from silotune.messages import Expected, Fields, MessageRefused, pack, shared_tensors, unpack
from silotune.parts import Part, State, Tensors, flatten, unflatten
from silotune.randomness import sampler
from silotune.server_optimizers import ServerOptimizer

BROADCAST_FIELDS: Mapping[str, type] = {"round": int}
UPDATE_FIELDS: Mapping[str, type] = {"round": int, "silo": str, "rows": int}
_MOST_ROWS = 2**53  # beyond it a weight is not exact in float64, and sums of weights can overflow


class Coordinator:
    """Holds the shared parts, and no rows.

    Args:
        shared: the shared parts before round 1.
        aggregation: how updates are combined.
        seed: for choosing silos.
        fraction: share of the silos a round, or
        count: their number; neither: all.
        max_norm: the largest norm an update may have; None: any finite one.
        optimizer: what is done with the aggregate; None: it is adopted.
    """

    def __init__(
        self,
        shared: State,
        aggregation: Aggregation,
        seed: int,
        *,
        fraction: float | None = None,
        count: int | None = None,
        max_norm: float | None = None,
        optimizer: ServerOptimizer | None = None,
    ) -> None:
        self.shared = shared
        self.optimizer = optimizer or ServerOptimizer()
        self._aggregation = aggregation
        self._seed = seed
        self._fraction = fraction
        self._count = count
        self._max_norm = max_norm
        self._expected = Expected.like(flatten(shared))

    @property
    def communicates(self) -> bool:
        """Whether anything is sent at all."""
        return any(self.shared.values())

    def choose(self, number: int, silos: Sequence[str]) -> list[str]:
        """The silos of a round, in name order; at least one."""
        names = sorted(silos)
        count = self._count
        if count is None:
            count = len(names) if self._fraction is None else max(1, math.ceil(self._fraction * len(names) - 1e-9))
        if count >= len(names):
            return names
        return sorted(sampler(self._seed, "choose", number).sample(names, count))

    def broadcast(self, number: int) -> bytes:
        """The message that opens a round."""
        return pack(flatten(self.shared), {"round": number})

    def read_broadcast(self, message: bytes) -> State:
        """The silo's side of `broadcast`."""
        return unflatten(unpack(message, self._expected, BROADCAST_FIELDS)[0])

    def receive(self, number: int, silo: str, message: bytes) -> Update:
        """Check one silo's update.

        Raises:
            MessageRefused: malformed, of another round, or sent in another silo's name.
        """
        tensors, fields = unpack(message, self._expected, UPDATE_FIELDS)
        if fields["round"] != number:
            raise MessageRefused(f"update of round {fields['round']}, expected {number}")
        if fields["silo"] != silo:
            raise MessageRefused(f"update in the name of {fields['silo']!r}")
        rows = int(fields["rows"])
        if not 1 <= rows <= _MOST_ROWS:
            raise MessageRefused(f"field 'rows' must be between 1 and {_MOST_ROWS}")
        self._check_norm(tensors)
        return Update(silo, tensors, rows)

    def _check_norm(self, tensors: Tensors) -> None:
        """Refuse an update that moves the shared parts too far (the norm of the change, not of the weights)."""
        if self._max_norm is None:
            return
        before = flatten(self.shared)
        norm = math.sqrt(sum(float((t.double() - before[name].double()).square().sum()) for name, t in tensors.items()))
        if norm > self._max_norm:
            raise MessageRefused(f"norm of the update {norm:.3g} is above aggregation.max_norm={self._max_norm:g}")

    def aggregate(self, updates: Sequence[Update]) -> None:
        """Set the shared parts from a round's updates; without any they stay."""
        if updates:
            ordered = sorted(updates, key=lambda update: update.silo)
            aggregate = self._aggregation(ordered)
            self.shared = unflatten(self.optimizer.step(flatten(self.shared), aggregate))

    def adopt(self, state: State) -> None:
        """Set the shared parts to those of a state: what the server step made of them."""
        self.shared = {name: state[name] for name in self.shared}

    def flat(self) -> Tensors:
        """`{"shared/part/tensor": …, "server/…": …}`, as in checkpoints and digests."""
        shared = {f"shared/{name}": tensor for name, tensor in flatten(self.shared).items()}
        return shared | {f"server/{name}": tensor for name, tensor in self.optimizer.state.items()}

    def load_flat(self, tensors: Tensors) -> None:
        """Set the coordinator to a state that `flat` gave."""
        groups: dict[str, Tensors] = {"shared": {}, "server": {}}
        for name, tensor in tensors.items():
            group, rest = name.split("/", 1)
            groups[group][rest] = tensor
        self.shared, self.optimizer.state = unflatten(groups["shared"]), groups["server"]


def update_message(state: State, parts: Mapping[str, Part], number: int, silo: str, rows: int) -> bytes:
    """What leaves a silo: exactly the shared parts, the round, its name and its row count."""
    tensors: Tensors = shared_tensors(state, parts)
    fields: Fields = {"round": number, "silo": silo, "rows": rows}
    return pack(tensors, fields)
