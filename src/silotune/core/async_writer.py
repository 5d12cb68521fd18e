"""Write and remove files of tensors in a background thread, so that a run need not wait for its checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from silotune.core.files import write_bytes
from silotune.core.serialization import tensor_bytes
from silotune.core.tensors import Tensors

_QUEUE_LENGTH = 8
"""Files that may wait to be written; their tensors stay in memory meanwhile."""


class AsyncWriter:
    """Writes and removes files in order, in one background thread. `write` replaces a file atomically."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()

    def write(self, path: Path, tensors: Tensors) -> None:
        """Queue a file; the caller must not modify the tensors afterwards.

        Raises:
            OSError: an earlier file could not be written.
        """
        self._submit(write_tensors, path, tensors)

    def remove(self, paths: Sequence[Path]) -> None:
        """Queue the removal of files; missing files are ignored.

        Raises:
            OSError: an earlier file could not be written or removed.
        """
        self._submit(remove_files, paths)

    def _submit(self, action: Callable[..., None], *arguments: object) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "silotune-writer")
        while len(self._waiting) >= _QUEUE_LENGTH:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(action, *arguments))

    def finish(self) -> None:
        """Wait until the queue is empty.

        Raises:
            OSError: a file could not be written or removed.
        """
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Stop the thread after the queued actions; their errors are dropped."""
        self._waiting.clear()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Replace a safetensors file atomically: readers see the old content or the new."""
    write_bytes(path, tensor_bytes(tensors))


def remove_files(paths: Sequence[Path]) -> None:
    """Remove files; missing ones are ignored, because processes of one machine clean up the same folder."""
    for path in paths:
        path.unlink(missing_ok=True)
