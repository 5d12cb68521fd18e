"""`StateMemory`: silos' states on disk, of which the last used stay in memory too; `StoredState` is one of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from silotune.runs.storage.checkpoints import Checkpoints
from silotune.runs.storage.state_shards import StateShards
from silotune.training.silo import SiloState


class StateMemory:
    """Writes states to shards, and keeps those that were used last in memory, up to a number of bytes.

    Args:
        checkpoints: where states are written and read.
        mib: the most MiB of states in memory; what training has in hand comes on top.
    """

    def __init__(self, checkpoints: Checkpoints, mib: int) -> None:
        self._checkpoints = checkpoints
        self._shards = StateShards(checkpoints)
        self._most = mib * 2**20
        self._states: OrderedDict[str, tuple[SiloState, int]] = OrderedDict()
        """Location → state and its bytes, the last used one last."""
        self._bytes = 0

    def write(self, round_number: int, state: SiloState) -> StoredState:
        """Write a state, and return what stands for it."""
        return self.stored(self._shards.write(round_number, state), state)

    def stored(self, location: str, state: SiloState) -> StoredState:
        """Return what stands for a state that is at this location."""
        self._keep(location, state)
        return StoredState(self, location)

    def joined(self, round_number: int, locations: Mapping[str, str]) -> dict[str, StoredState]:
        """Move states of thin shards together (`StateShards.joined`); returns silo → what stands for its state."""
        moved = self._shards.joined(round_number, locations)
        return {name: StoredState(self, location) for name, location in moved.items()}

    def read(self, location: str) -> SiloState:
        """Return the state at a location."""
        kept = self._states.get(location)
        state = kept[0] if kept else SiloState.from_flat(self._checkpoints.read(location))
        self._keep(location, state)
        return state

    def _keep(self, location: str, state: SiloState) -> None:
        _, before = self._states.pop(location, (state, 0))
        size = sum(tensor.nbytes for tensor in state.flat().values())
        self._states[location] = state, size
        self._bytes += size - before
        while self._bytes > self._most:
            _, (_, dropped) = self._states.popitem(last=False)
            self._bytes -= dropped


class StoredState(SiloState):
    """A state that is read from disk where its private parts or memory are asked for."""

    def __init__(self, states: StateMemory, location: str) -> None:
        self._states = states
        self.location = location

    def __getattr__(self, name: str) -> Any:
        if name not in ("private", "memory"):
            raise AttributeError(name)
        return getattr(self._states.read(self.location), name)
