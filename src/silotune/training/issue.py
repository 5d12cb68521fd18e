"""`Issue`: the shared parts as each silo receives them: all alike, or at its own LoRA rank."""

from __future__ import annotations

from collections.abc import Mapping

from silotune.communication.aggregation import RankAggregation
from silotune.communication.messages import broadcast_message
from silotune.core.tensors import State, Tensors, flatten, unflatten

NO_RANKS: Mapping[str, int] = {}


class Issue:
    """What the silos receive of one state of the shared parts; silos of equal rank receive the same objects.

    Args:
        shared: the shared parts, of the run's rank.
        ranks: silo → its rank, for silos of another one than the run's.
        aggregation: brings the shared parts to these ranks; None where there are none.
    """

    def __init__(
        self, shared: State, ranks: Mapping[str, int] = NO_RANKS, aggregation: RankAggregation | None = None
    ) -> None:
        self.shared = shared
        self._ranks = ranks
        self._aggregation = aggregation
        self._tensors: dict[int, Tensors] = {}
        self._messages: dict[tuple[int, int | None], bytes] = {}

    def of(self, shared: State) -> Issue:
        """Return the same of another state of the shared parts."""
        return Issue(shared, self._ranks, self._aggregation)

    def rank(self, silo: str | None) -> int | None:
        """Return a silo's rank; None: the run's."""
        return None if silo is None else self._ranks.get(silo)

    def state(self, silo: str | None) -> State:
        """Return the shared parts as a silo receives them; None: as the coordinator has them."""
        if self.rank(silo) is None:
            return self.shared
        state = unflatten(self.tensors(silo))
        return {name: state.get(name, {}) for name in self.shared}

    def tensors(self, silo: str | None) -> Tensors:
        """Return the shared parts as a silo receives them, by "part/tensor" name."""
        rank = self.rank(silo)
        if rank is None:
            return flatten(self.shared)
        if rank not in self._tensors:
            assert self._aggregation is not None, "given with the ranks"
            self._tensors[rank] = self._aggregation.to_rank(flatten(self.shared), rank)
        return self._tensors[rank]

    def message(self, silo: str | None, number: int) -> bytes:
        """Return the message that opens a round for a silo; the same bytes object for all silos of a rank."""
        key = number, self.rank(silo)
        if key not in self._messages:
            self._messages = {other: message for other, message in self._messages.items() if other[0] == number}
            self._messages[key] = broadcast_message(self.state(silo), number)
        return self._messages[key]
