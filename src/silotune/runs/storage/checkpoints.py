"""Write and read checkpoints: a manifest for each round, and the tensor files that it names.

A manifest (`checkpoints/round-0007.json`) names the file of the shared parts and, for every silo that ever took part,
that of its last state. Files are written first, while silos train, and the manifest is moved into place last, so that a
run killed at any instant finds a whole checkpoint, old or new.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from silotune.core.files import damage_named, file_sha256, read_json, write_text
from silotune.core.serialization import read_tensor_file, write_tensor_file
from silotune.core.tensors import State, Tensors, flatten
from silotune.training.context import TrainingContext
from silotune.training.silo import Silo, SiloState


@dataclass(frozen=True)
class Checkpoint:
    """One round's manifest: the files of its states, the run's `History` as plain values, and each file's sha256."""

    round: int
    shared: str
    silos: dict[str, str]
    history: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def names(self) -> set[str]:
        """The tensor files this checkpoint needs."""
        return {self.shared, *self.silos.values()}


_ROUND = re.compile(r"(\d+)(-final)?\.safetensors$")
"""The number of the round that a tensor file is of."""


class Checkpoints:
    """The folder `checkpoints` of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made_folders: set[Path] = set()
        self._files: set[str] | None = None
        """The tensor files that a commit may drop: what was there at the first one, and what was written since.

        Silos of a federation on this machine write theirs here as well, and drop them themselves.
        """
        self._recorded: dict[str, str] = {}
        """The sha256 of tensor files."""
        self._writer = AsyncWriter()

    def write(self, name: str, tensors: Tensors) -> str:
        """Write a tensor file, and return its name. It is there for certain after `commit`.

        Until then nobody may change the tensors.
        """
        file = f"{name}.safetensors"
        path = self.path / file
        if path.parent not in self._made_folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._made_folders.add(path.parent)
        if self._files is not None:
            self._files.add(file)
        self._writer.write(path, tensors, partial(self._recorded.__setitem__, file))
        return file

    def read(self, file: str) -> Tensors:
        """Read a tensor file."""
        self._writer.finish()
        return read_tensor_file(self.path, file, self._recorded if file in self._recorded else None)

    def commit(self, checkpoint: Checkpoint, keep: Checkpoint | None = None) -> None:
        """Make a checkpoint the newest; drop files that neither it nor `keep` needs."""
        self._writer.finish()
        for name in checkpoint.names - self._recorded.keys():  # of a silo on this machine, or from before
            if (self.path / name).is_file():
                self._recorded[name] = file_sha256(self.path / name)
        files = {name: self._recorded[name] for name in sorted(checkpoint.names & self._recorded.keys())}
        write_text(self._manifest(checkpoint.round), json.dumps(vars(checkpoint) | {"files": files}, indent=1))
        names = checkpoint.names | (keep.names if keep else set())
        manifests = {checkpoint.round} | ({keep.round} if keep else set())
        if self._files is None:  # what a run that was killed left, too
            self._files = set(self._tensor_files())
        self._writer.remove([self.path / name for name in sorted(self._files - names)])
        self._files &= names
        for number in self._rounds() - manifests:
            self._manifest(number).unlink()

    def drop_older(self, checkpoint: Checkpoint, keep: Checkpoint | None = None) -> None:
        """Drop the files up to this checkpoint's round that neither it nor `keep` needs.

        A run that was killed in `commit` left them, and no other commit may follow. Newer ones stay: silos write ahead.
        """
        names = checkpoint.names | (keep.names if keep else set())
        for name in sorted(set(self._tensor_files()) - names):
            if (number := _ROUND.search(name)) and int(number[1]) <= checkpoint.round:
                (self.path / name).unlink(missing_ok=True)
        for older in self._rounds() - {checkpoint.round, *([keep.round] if keep else [])}:
            self._manifest(older).unlink()

    def _tensor_files(self) -> Iterator[str]:
        """Return the tensor files in the folder, as checkpoints name them."""
        for directory, _, names in os.walk(self.path):
            folder = Path(directory).relative_to(self.path)
            yield from ((folder / name).as_posix() for name in names if name.endswith(".safetensors"))

    def close(self) -> None:
        """Finish writing; nothing is written afterwards."""
        self._writer.close()

    def forget(self) -> None:
        """Remove all checkpoints, manifests first, so that a run killed meanwhile starts from the beginning."""
        self.close()
        for number in self._rounds():
            self._manifest(number).unlink()
        shutil.rmtree(self.path, ignore_errors=True)

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint."""
        rounds = self._rounds()
        return self.load(max(rounds)) if rounds else None

    def _rounds(self) -> set[int]:
        """Return the rounds that have a manifest."""
        matches = (re.fullmatch(r"round-(\d+)\.json", path.name) for path in self.path.iterdir() if path.is_file())
        return {int(match[1]) for match in matches if match}

    def _manifest(self, number: int) -> Path:
        return self.path / f"round-{number:04d}.json"

    def load(self, number: int) -> Checkpoint:
        """Return a round's checkpoint."""
        path = self._manifest(number)
        with damage_named(f"checkpoint {path}"):
            checkpoint = Checkpoint(**read_json(path))
            for name in (checkpoint.shared, *checkpoint.silos.values()):
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise ValueError(f"names a file outside the run folder: {name}")
            if checkpoint.round != number:
                raise ValueError(f"is of round {checkpoint.round!r}")
            self._recorded |= checkpoint.files
        return checkpoint


def check_state(state: State, expected: State) -> None:
    """Raise a ValueError if tensors that were read are not those of this run."""
    layout, target = ({n: (t.shape, t.dtype) for n, t in flatten(some).items()} for some in (state, expected))
    differing = sorted(name for name in {*layout, *target} if layout.get(name) != target.get(name))
    if differing:
        raise ValueError(f"tensor {differing[0]!r} is missing, unexpected or of another shape")


def load_silo(checkpoints: Checkpoints, checkpoint: Checkpoint, context: TrainingContext, silo: Silo) -> None:
    """Set a silo to a checkpoint's state; without a file, it was never sampled and its state follows from the seed."""
    file, silo.state = checkpoint.silos.get(silo.name), None
    if file:
        expected = context.state_of(silo).private
        with damage_named(f"checkpoint file {file}"):
            silo.state = SiloState.from_flat(checkpoints.read(file))
            check_state(silo.state.private, expected)


_QUEUE_LENGTH = 8
"""Files that may wait to be written; their tensors stay in memory meanwhile."""


class AsyncWriter:
    """Writes and removes files in order, in one background thread. `write` replaces a file atomically."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()

    def write(self, path: Path, tensors: Tensors, record: Callable[[str], None]) -> None:
        """Queue a file, whose tensors must not change anymore, and record its sha256; raises earlier files' errors."""
        self._submit(lambda: record(write_tensor_file(path, tensors)))

    def remove(self, paths: Sequence[Path]) -> None:
        """Queue the removal of files; missing files are ignored."""
        self._submit(remove_files, paths)

    def _submit(self, action: Callable[..., None], *arguments: object) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "silotune-writer")
        while len(self._waiting) >= _QUEUE_LENGTH:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(action, *arguments))

    def finish(self) -> None:
        """Wait until the queue is empty; raises the error of a file that could not be written or removed."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Stop the thread after the queued actions; their errors are dropped."""
        self._waiting.clear()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def remove_files(paths: Sequence[Path]) -> None:
    """Remove files; missing ones are ignored, because processes of one machine clean up the same folder."""
    for path in paths:
        path.unlink(missing_ok=True)
