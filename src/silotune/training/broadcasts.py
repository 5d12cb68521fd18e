"""Make the shared parts as each silo receives them: whole, cut to its LoRA rank, or of its own."""

from __future__ import annotations

from collections.abc import Mapping

from silotune.aggregation import RankAggregation, SiloAggregation
from silotune.communication.messages import broadcast_message
from silotune.core.tensors import State, Tensors, flatten, unflatten

NO_RANKS: Mapping[str, int] = {}

VariantKey = int | str | None
"""What decides about the tensors that a silo receives: its rank, its name, or None: they are the coordinator's own."""


class Broadcasts:
    """The tensors that silos receive of one state of the shared parts; equal keys share the same objects.

    Args:
        shared: the shared parts, of the run's rank.
        ranks: silo → its rank, for silos of another one than the run's.
        aggregation: brings the shared parts to these ranks, or makes every silo's own; None where nothing does.
    """

    def __init__(
        self,
        shared: State,
        ranks: Mapping[str, int] = NO_RANKS,
        aggregation: RankAggregation | SiloAggregation | None = None,
    ) -> None:
        self.shared = shared
        self._ranks = ranks
        self._aggregation = aggregation
        self._tensors: dict[VariantKey, Tensors] = {}
        self._messages: dict[tuple[int, VariantKey], bytes] = {}

    def of(self, shared: State) -> Broadcasts:
        """Return the same of another state of the shared parts."""
        return Broadcasts(shared, self._ranks, self._aggregation)

    def key(self, silo: str | None) -> VariantKey:
        """Return the key on which the tensors that a silo receives depend."""
        if silo is None:
            return None
        return silo if isinstance(self._aggregation, SiloAggregation) else self._ranks.get(silo)

    def state(self, silo: str | None) -> State:
        """Return the shared parts as a silo receives them; None: as the coordinator has them."""
        if self.key(silo) is None:
            return self.shared
        state = unflatten(self.tensors(silo))
        return {name: state.get(name, {}) for name in self.shared}

    def tensors(self, silo: str | None) -> Tensors:
        """Return the shared parts as a silo receives them, by "part/tensor" name."""
        key = self.key(silo)
        if key is None:
            return flatten(self.shared)
        if key not in self._tensors:
            self._tensors[key] = self._made(flatten(self.shared), key)
        return self._tensors[key]

    def _made(self, shared: Tensors, key: int | str) -> Tensors:
        if isinstance(key, str):
            assert isinstance(self._aggregation, SiloAggregation), "such silos go by name"
            return self._aggregation.issued(shared, key)
        assert isinstance(self._aggregation, RankAggregation), "given with the ranks"
        return self._aggregation.to_rank(shared, key)

    def message(self, silo: str | None, number: int) -> bytes:
        """Return the message that opens a round for a silo; the same bytes object for all silos of a key."""
        key = number, self.key(silo)
        if key not in self._messages:
            self._messages = {other: message for other, message in self._messages.items() if other[0] == number}
            self._messages[key] = broadcast_message(self.state(silo), number)
        return self._messages[key]
