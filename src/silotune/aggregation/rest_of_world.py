"""`SiloAggregation`: every silo receives tensors of its own; `RestOfWorld`: the mean of the others' last updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch
from typing_extensions import override

from silotune.aggregation.broadcast_aggregation import BroadcastAggregation
from silotune.aggregation.update import Update
from silotune.core.tensors import Tensors


class SiloAggregation(BroadcastAggregation):
    """An aggregation that issues other tensors to every silo. The coordinator's own are for the log alone.

    `state` is what it keeps from round to round, by name; it is in checkpoints.
    """

    def __init__(self) -> None:
        self.state: Tensors = {}

    @abstractmethod
    def issued(self, shared: Tensors, silo: str) -> Tensors:
        """Return the shared tensors as a silo receives them; before the first update, as they are.

        Args:
            shared: the coordinator's shared tensors, by "part/tensor" name.
            silo: the silo's name.
        """


class RestOfWorld(SiloAggregation):
    """A silo receives the mean of the others' last updates, each counted once (FedALT, Bian et al. 2025).

    A silo that was not sampled, or whose update was refused, counts with its last one; one that never sent an update
    does not count. Without any other silo's update all tensors are zero, so that such a LoRA does nothing. The
    coordinator's own tensors are the mean of all silos' last updates.
    """

    name = "rest-of-world"
    changes_add_up = False  # a silo's tensors do not go on from what it received

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        state = dict(self.state)
        for update in updates:
            state |= {f"{update.silo}/{name}": tensor for name, tensor in update.tensors.items()}
        self.state = state
        sums = self._sums()
        return {name: (total / count).to(before[name].dtype) for name, (total, count) in sums.items()}

    @override
    def issued(self, shared: Tensors, silo: str) -> Tensors:
        if not self.state:
            return shared
        result = {}
        for name, (total, count) in self._sums().items():
            own = self.state.get(f"{silo}/{name}")
            others = count - (own is not None)
            rest = total if own is None else total - own.double()
            result[name] = (rest / others if others else torch.zeros_like(total)).to(shared[name].dtype)
        return shared | result

    def _sums(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Return name → the sum over silos in float64, in name order, and their number."""
        sums: dict[str, tuple[torch.Tensor, int]] = {}
        for key in sorted(self.state):
            _, part, tensor = key.rsplit("/", 2)
            total, count = sums.get(f"{part}/{tensor}", (torch.zeros((), dtype=torch.float64), 0))
            sums[f"{part}/{tensor}"] = total + self.state[key].double(), count + 1
        return sums
