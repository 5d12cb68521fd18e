"""Tensor files that are written and removed beside the work: a silo's checkpoint while the next silo trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from silotune.core.files import write_bytes
from silotune.core.serialization import tensor_bytes
from silotune.core.tensors import Tensors

_AHEAD = 8
"""Files that wait to be written; their tensors are in memory meanwhile."""


class AsyncWriter:
    """Writes and removes files one after the other, in a thread of its own. Each is replaced as a whole."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()

    def write(self, path: Path, tensors: Tensors) -> None:
        """Write a file, soon: nobody may change the tensors any more.

        Raises:
            OSError: an earlier file could not be written.
        """
        self._do(write_tensors, path, tensors)

    def remove(self, paths: Sequence[Path]) -> None:
        """Remove files, soon, where they are still there.

        Raises:
            OSError: as `write`.
        """
        self._do(remove_files, paths)

    def _do(self, action: Callable[..., None], *arguments: object) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "silotune-writer")
        while len(self._waiting) >= _AHEAD:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(action, *arguments))

    def finish(self) -> None:
        """Wait until all is done.

        Raises:
            OSError: a file could not be written or removed.
        """
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Wait until nothing more is written, whether or not it could be."""
        self._waiting.clear()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Replace a safetensors file: readers see the old one or the new."""
    write_bytes(path, tensor_bytes(tensors))


def remove_files(paths: Sequence[Path]) -> None:
    """Remove files; those of a federation on one machine are tidied up by others too."""
    for path in paths:
        path.unlink(missing_ok=True)
