"""`StateShards`: many silos' states in one file (`states/0007-000.states`), joined as they thin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from silotune.core.serialization import tensor_bytes
from silotune.core.tensors import Tensors
from silotune.runs.storage.checkpoints import Checkpoints, file_of
from silotune.training.silo import SiloState

SHARD_BYTES = 64 * 2**20
"""A shard that holds so much is full."""

_THIN_SHARDS = 8
"""Shards that are less than half used; with more of them, their states move to new shards."""


class StateShards:
    """Writes states into the shards of a round; a place that a manifest names is never written again.

    A shard is thin while less than half of `SHARD_BYTES` of it are states that the newest manifest names: it was made
    in a round of few silos, or its silos have newer states. So at most `_THIN_SHARDS` shards waste more than half, and
    a state moves once in about so many rounds until it is in a full shard.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._round = 0
        self._shard = 0
        self._end = 0

    def write(self, round_number: int, state: SiloState) -> str:
        """Write a state, and return its location; it is there for certain after the round's commit."""
        return self._append(round_number, state.flat())

    def joined(self, round_number: int, locations: Mapping[str, str]) -> dict[str, str]:
        """Move the states of thin shards together, if there are many of those.

        Args:
            round_number: the round whose manifest is about to be written.
            locations: silo → location, of all silos that have one.

        Returns:
            Silo → new location, of those that moved. The old ones stay as long as a manifest names them.
        """
        used: Counter[str] = Counter()
        for location in locations.values():
            if file_of(location) != location:
                used[file_of(location)] += int(location.rpartition("+")[2])
        thin = {file for file, size in used.items() if size < SHARD_BYTES // 2 and not self._writes(file)}
        if len(thin) <= _THIN_SHARDS:
            return {}
        moving = [name for name, location in locations.items() if file_of(location) in thin]
        return {name: self._append(round_number, self._checkpoints.read(locations[name])) for name in moving}

    def _writes(self, file: str) -> bool:
        return file.startswith(f"states/{self._round:04d}-")

    def _append(self, round_number: int, tensors: Tensors) -> str:
        content = tensor_bytes(tensors)
        if round_number != self._round:
            self._round, self._shard, self._end = round_number, 0, 0
        elif self._end >= SHARD_BYTES:
            self._shard, self._end = self._shard + 1, 0
        start, self._end = self._end, self._end + len(content)
        return self._checkpoints.place(f"states/{round_number:04d}-{self._shard:03d}.states", start, content)
