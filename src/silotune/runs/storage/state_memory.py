"""Keep silos' states in checkpoint files, and the last used ones in memory too (`state.memory_mib`)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from silotune.runs.storage.checkpoints import Checkpoints
from silotune.training.silo import SiloState


class StateMemory:
    """Writes states to files, and keeps the last used ones in memory, up to a number of bytes.

    Args:
        checkpoints: where states are written and read.
        mib: the most MiB of states in memory; what training has in hand comes on top.
    """

    def __init__(self, checkpoints: Checkpoints, mib: int) -> None:
        self._checkpoints = checkpoints
        self._most = mib * 2**20
        self._states: OrderedDict[str, tuple[SiloState, int]] = OrderedDict()
        """File → state and its bytes, the last used one last."""
        self._bytes = 0

    def write(self, name: str, state: SiloState) -> StoredState:
        """Write a state to a file of this name (without ending), and return what stands for it."""
        return self.stored(self._checkpoints.write(name, state.flat()), state)

    def stored(self, file: str, state: SiloState) -> StoredState:
        """Return a placeholder for the state at a location."""
        self._keep(file, state)
        return StoredState(self, file)

    def read(self, file: str) -> SiloState:
        """Return the state of a file."""
        kept = self._states.get(file)
        state = kept[0] if kept else SiloState.from_flat(self._checkpoints.read(file))
        self._keep(file, state)
        return state

    def _keep(self, file: str, state: SiloState) -> None:
        _, before = self._states.pop(file, (state, 0))
        size = sum(tensor.nbytes for tensor in state.flat().values())
        self._states[file] = state, size
        self._bytes += size - before
        while self._bytes > self._most:
            _, (_, dropped) = self._states.popitem(last=False)
            self._bytes -= dropped


class StoredState(SiloState):
    """A state that is read from its file when its private parts or memory are asked for."""

    def __init__(self, states: StateMemory, file: str) -> None:
        self._states = states
        self.file = file

    def __getattr__(self, name: str) -> Any:
        if name not in ("private", "memory"):
            raise AttributeError(name)
        return getattr(self._states.read(self.file), name)
