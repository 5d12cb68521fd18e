"""`StateStore`: a silo's states and last replies by round, on its disk; a repeated request gets its reply.

`<folder>/<run>/<name>.safetensors` is a state (`0003`, or `0003-final` after the method's final phases), and
`<name>.answer` the reply that led to it. The state is written first, so that every reply has its state.
`0003-scores.answer` holds the scores of round 3.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from silotune.core.files import write_bytes
from silotune.core.serialization import read_tensors, tensor_bytes
from silotune.core.tensors import Tensors
from silotune.distributed.protocol.frames import Frame, ProtocolError, decode
from silotune.errors import InputError

RUN_ID = re.compile(r"[0-9a-f]{16}")
"""A run's id, and the name of its folder."""

Room = Callable[[int, int], None]
"""Called with the bytes of all runs' files and those that are about to be added; raises if they are too many."""

_NAME = re.compile(r"\d{4,}(-final)?")

_SCORES = "-scores"
"""End of the names of replies that belong to no state."""


def scores_name(number: int) -> str:
    """Return the name under which a reply with a round's scores is kept; no state has this name."""
    return f"{number:04d}{_SCORES}"


def check_run_id(run: str) -> None:
    """Refuse a malformed run id: it becomes part of paths."""
    if not RUN_ID.fullmatch(run):
        raise InputError(f"run id {run[:40]!r}: must be 16 hexadecimal digits")


@dataclass(frozen=True)
class Reply:
    """A reply to the coordinator.

    Args:
        frame: what leaves.
        about: what the record of what left says beside it; it does not leave.
    """

    frame: Frame
    about: Mapping[str, Any] = field(default_factory=dict)


class StateStore:
    """The states and replies of one silo in one run.

    Args:
        folder: the silo's folder; the run's folder in it is made with its first file.
        run: the run's id, 16 hexadecimal digits.
        room: judges bytes before they are written; None: there is no limit.
    """

    def __init__(self, folder: Path, run: str, room: Room | None = None) -> None:
        check_run_id(run)
        self.path = folder / run
        self._room = room

    def make(self) -> None:
        """Make the run's folder, for the operator alone."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)

    def require_room(self, more: int) -> None:
        """Judge bytes that are about to be added to the files of runs; raises what `room` raises."""
        if self._room is not None:
            runs = [path for path in self.path.parent.glob("*") if RUN_ID.fullmatch(path.name)]
            self._room(sum(map(_used, runs)), more)

    def write(self, name: str, tensors: Tensors) -> None:
        """Write a state; raises what `room` raises."""
        self._write(self._state(name), tensor_bytes(tensors))

    def read(self, name: str) -> Tensors:
        """Read a state."""
        path = self._state(name)
        try:
            return read_tensors(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise InputError(f"state {name!r} of this silo: missing or damaged ({error})") from error

    def digest(self, name: str) -> str:
        """Return the sha256 of a state's file."""
        try:
            return hashlib.sha256(self._state(name).read_bytes()).hexdigest()
        except OSError as error:
            raise InputError(f"state {name!r} of this silo: missing or damaged ({error})") from error

    def keep_reply(self, name: str, request: dict[str, str], reply: Reply) -> None:
        """Write a reply together with the request's key fields; raises what `room` raises."""
        wrapped = Frame("stored", {"asked": request, "about": dict(reply.about)}, {"answer": reply.frame.encode()})
        self._write(self.path / f"{name}.answer", wrapped.encode())

    def find_reply(self, name: str, request: dict[str, str]) -> Reply | None:
        """Return the reply kept for the same request; None if it or its state is missing."""
        try:
            stored = decode((self.path / f"{name}.answer").read_bytes())
            if stored.fields["asked"] != request:
                return None
            if not name.endswith(_SCORES) and not self._state(name).is_file():
                return None
            about = stored.fields.get("about", {})  # a reply of an earlier version has none
            return Reply(decode(stored.blobs["answer"]), about)
        except (OSError, ProtocolError, KeyError):
            return None

    def delete(self, before: int, keep: Collection[str]) -> None:
        """Delete states and replies of earlier rounds, except these; a late request cannot delete newer ones.

        Args:
            before: number of the round.
            keep: names of states.
        """
        for path in self.path.glob("*"):
            name = path.stem.removesuffix(_SCORES)
            known = path.suffix in (".safetensors", ".answer") and _NAME.fullmatch(name)
            if known and path.stem not in keep and int(path.stem.split("-")[0]) < before:
                path.unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        replaced = path.stat().st_size if path.is_file() else 0
        self.require_room(len(data) - replaced)
        self.make()
        write_bytes(path, data)

    def _state(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InputError(f"state {name[:40]!r}: no name of a state")
        return self.path / f"{name}.safetensors"


def _used(folder: Path) -> int:
    """Return the bytes of the files in a folder and below it."""
    total = 0
    for path, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(path, file)).st_size
    return total
