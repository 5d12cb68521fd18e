"""A silo's own folder: its state after each round it took part in, and its last answers. Files are whole or not there.

`<folder>/<run>/<name>.safetensors` is a state (`0003`, or `0003-final` after the method's final phases), and
`<name>.answer` what the silo answered when it got there. The state is written first: where there is an answer, there is
the state it belongs to. `0003-scores.answer` is how good the silo found round 3.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError

from silotune.core.files import write_bytes
from silotune.core.serialization import read_tensors, tensor_bytes
from silotune.core.tensors import Tensors
from silotune.distributed.protocol.frames import Frame, ProtocolError, decode
from silotune.errors import InputError

_RUN = re.compile(r"[0-9a-f]{16}")

_NAME = re.compile(r"\d{4,}(-final)?")

_SCORES = "-scores"


def scores_name(number: int) -> str:
    """The name of what was answered when a round was judged; there is no state of this name."""
    return f"{number:04d}{_SCORES}"


class StateStore:
    """One run's states of one silo.

    Args:
        folder: the silo's own.
        run: the run's id, 16 hexadecimal digits.

    Raises:
        InputError: for another id.
    """

    def __init__(self, folder: Path, run: str) -> None:
        if not _RUN.fullmatch(run):
            raise InputError(f"run id {run[:40]!r}: must be 16 hexadecimal digits")
        self.path = folder / run
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)

    def write(self, name: str, tensors: Tensors) -> None:
        """Keep a state."""
        write_bytes(self._state(name), tensor_bytes(tensors))

    def read(self, name: str) -> Tensors:
        """A state.

        Raises:
            InputError: if it is missing or damaged.
        """
        path = self._state(name)
        try:
            return read_tensors(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise InputError(f"state {name!r} of this silo: missing or damaged ({error})") from error

    def keep_reply(self, name: str, asked: dict[str, str], answer: Frame) -> None:
        """Remember what was answered; `asked` says to what."""
        wrapped = Frame("stored", {"asked": asked}, {"answer": answer.encode()})
        write_bytes(self.path / f"{name}.answer", wrapped.encode())

    def answered(self, name: str, asked: dict[str, str]) -> Frame | None:
        """The answer given before to the same question; None where there is none, or its state is gone."""
        try:
            stored = decode((self.path / f"{name}.answer").read_bytes())
            if stored.fields["asked"] != asked:
                return None
            if not name.endswith(_SCORES) and not self._state(name).is_file():
                return None
            return decode(stored.blobs["answer"])
        except (OSError, ProtocolError, KeyError):
            return None

    def forget(self, keep: Collection[str], before: int) -> None:
        """Drop the states and answers of rounds before this one, but these. A late request cannot drop newer ones."""
        for path in self.path.iterdir():
            ours = path.suffix in (".safetensors", ".answer") and _NAME.fullmatch(path.stem.removesuffix(_SCORES))
            if ours and path.stem not in keep and int(path.stem.split("-")[0]) < before:
                path.unlink(missing_ok=True)

    def _state(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InputError(f"state {name[:40]!r}: no name of a state")
        return self.path / f"{name}.safetensors"
