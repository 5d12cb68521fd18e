"""`RotatingLog`: a thread writes a process's output, whole lines, to files of limited size.

The process writes to a pipe, and a thread of the supervisor moves whole lines to the file. So no line is lost or cut
while files change their names, as it can be where a file is truncated under a process that writes to it.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from silotune.core.clock import utc_now

LOG_BYTES = 16 * 2**20
"""Most bytes of a log; then it becomes `NAME.log.1`, and a new one begins."""

KEPT_LOGS = 4
"""Number of older files that are kept; `NAME.log.1` is the newest."""

_TIME = re.compile(rb"\d{4}-\d\d-\d\dT")

LONGEST_LINE = 2**16
"""Bytes of a line after which its beginning is written."""


class RotatingLog:
    """Moves what arrives at a pipe to a file, until all writers have closed the pipe.

    Args:
        path: the log; what an earlier process wrote stays.
        limit: most bytes of a file; one line may be longer.
        kept: number of older files.
        timed: whether lines that begin with no time get the time (UTC) at which they came, as those of Flower.
    """

    def __init__(self, path: Path, limit: int = LOG_BYTES, kept: int = KEPT_LOGS, *, timed: bool = False) -> None:
        self._path = path
        self._limit = limit
        self._kept = kept
        self._timed = timed
        self._file, self._size = _open(path)
        self._lost = 0
        self._source, self.sink = os.pipe()
        self._thread = threading.Thread(target=self._pump, name=f"log of {path.stem}", daemon=True)
        self._thread.start()

    def close_sink(self) -> None:
        """Close this process's end of the pipe, once the child has its own."""
        os.close(self.sink)

    def wait(self, patience: float) -> None:
        """Wait until everything is in the file, for at most `patience` seconds: a descendant may hold the pipe."""
        self._thread.join(patience)

    def _pump(self) -> None:
        pending = b""
        with os.fdopen(self._source, "rb", buffering=0) as source:
            while data := source.read(LONGEST_LINE):
                lines, newline, pending = (pending + data).rpartition(b"\n")
                self._write(lines + newline)
                if len(pending) >= LONGEST_LINE:
                    self._write(pending)
                    pending = b""
        self._write(pending)
        self._file.close()

    def _write(self, lines: bytes) -> None:
        """Write lines; where the disk takes none, count them, as the process must not be held up."""
        try:
            for line in self._with_time(lines):
                if self._size and self._size + len(line) > self._limit:
                    self._rotate()
                if self._lost:
                    self._size += self._file.write(f"{self._lost} bytes of output could not be written\n".encode())
                    self._lost = 0
                self._size += self._file.write(line)
        except OSError:
            self._lost += len(lines)

    def _with_time(self, lines: bytes) -> Iterator[bytes]:
        for line in lines.splitlines(keepends=True):
            yield f"{utc_now()} ".encode() + line if self._timed and not _TIME.match(line) else line

    def _rotate(self) -> None:
        files = [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, self._kept + 1))]
        for newer, older in reversed(list(itertools.pairwise(files))):
            if newer.exists():
                newer.replace(older)
        self._file.close()
        self._file, self._size = _open(self._path)


def _open(path: Path) -> tuple[FileIO, int]:
    """Open a log for appending; returns it with its size."""
    file = FileIO(path, "a")
    return file, os.fstat(file.fileno()).st_size
