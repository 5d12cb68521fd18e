"""`ChainedLog`: `audit.jsonl` in files of limited size, lines chained by sha256, end in `audit.head`; `check_chain`.

`audit.jsonl` is the newest file; full ones are renamed `audit-0001.jsonl`, `audit-0002.jsonl`, …, and the chain goes on
over them. `audit.head` holds the number and the digest of the last line, so that a missing end is noticed. A line is on
disk when `append` returns. Whoever can write the folder can also write a whole new chain: a copy of `audit.head` kept
elsewhere shows that, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from silotune.core.clock import utc_now
from silotune.errors import InputError

FILE, HEAD = "audit.jsonl", "audit.head"

_ROTATED = re.compile(r"audit-(\d{4,})\.jsonl")

LARGEST_FILE = 16 * 2**20
"""Bytes after which a file is renamed."""

_HEAD_BYTES = 128  # written in place: a rename can be lost with the power

_START = "0" * 64


@dataclass(frozen=True)
class Head:
    """Number and digest of a chain's last line; number 0 before the first."""

    number: int = 0
    digest: str = _START


class ChainedLog:
    """Appends lines to the chain in a folder; several threads and processes may do so.

    Args:
        folder: the folder; made with the first line.
        largest: bytes after which a file is renamed.
        in_all: bytes of all files after which no line is written; None: no limit.
    """

    def __init__(self, folder: Path, largest: int = LARGEST_FILE, in_all: int | None = None) -> None:
        self.folder = folder
        self._largest = largest
        self._in_all = in_all
        self._lock = threading.Lock()
        self._checked: Head | None = None

    def append(self, fields: Mapping[str, Any]) -> None:
        """Append a line with its number, the time, these fields, and the digest of the line before.

        Raises:
            OSError: the line cannot be written.
        """
        self._require_room()
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock, _locked_head(self.folder, write=True) as file:
            head = read_head(file)
            if head is None or head != self._checked:
                head = self._repaired(head, file)
            self._checked = self._write(head, fields, file)

    def _require_room(self) -> None:
        files = [*rotated_files(self.folder), self.folder / FILE] if self._in_all is not None else []
        if self._in_all is not None and sum(path.stat().st_size for path in files if path.exists()) >= self._in_all:
            raise InputError(
                f"{self.folder / FILE}: {self._in_all // 2**20:,} MiB of records; nothing is recorded, and nothing "
                f"leaves, until {_REMEDY}"
            )

    def _write(self, head: Head, fields: Mapping[str, Any], file: IO[bytes]) -> Head:
        """Write a line, then the head."""
        entry = {"number": head.number + 1, "time": utc_now(), **fields, "previous": head.digest}
        line = json.dumps(entry).encode()
        path = self.folder / FILE
        if path.exists() and path.stat().st_size >= self._largest:
            path.rename(self.folder / f"audit-{len(rotated_files(self.folder)) + 1:04d}.jsonl")
        with open(path, "ab", buffering=0, opener=_private) as log:
            log.write(line + b"\n")
            os.fsync(log.fileno())
        written = Head(head.number + 1, hashlib.sha256(line).hexdigest())
        _write_head(file, written)
        return written

    def _repaired(self, head: Head | None, file: IO[bytes]) -> Head:
        """Return the chain's end; what a killed process left between a line and its head is put right, and logged."""
        path = self.folder / FILE
        last, rest = _last_line(self.folder)
        if rest:  # a line that was cut off: its message never left
            os.truncate(path, path.stat().st_size - len(rest))
        if head is None:
            raise InputError(f"{self.folder / HEAD}: damaged; nothing is recorded, and nothing leaves, until {_REMEDY}")
        there = _head_of(last)
        if there == head:
            return head
        ahead = there is not None and there.number == head.number + 1 and _previous(last) == head.digest
        if not ahead:
            raise InputError(
                f"{path}: its end is not line {head.number}, which {HEAD} names; nothing is recorded, and nothing "
                f"leaves, until {_REMEDY}"
            )
        assert there is not None
        _write_head(file, there)
        return self._write(there, {"kind": "recovered", "reason": f"line {there.number} was not in {HEAD}"}, file)


_REMEDY = "its operator has looked (silotune silo audit) and moved all files audit* to another folder"


def rotated_files(folder: Path) -> list[Path]:
    """Return the full files of a chain, oldest first."""
    found = ((_ROTATED.fullmatch(path.name), path) for path in folder.glob("audit-*.jsonl"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def read_head(file: IO[bytes]) -> Head | None:
    """Read the head; before the first line it is the start, and None if it is damaged."""
    file.seek(0)
    content = file.read()
    if not content:
        return Head()
    try:
        fields = json.loads(content)
        return Head(int(fields["number"]), str(fields["digest"]))
    except (ValueError, KeyError, TypeError):
        return None


def check_chain(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Read a chain and look for changed, removed, inserted and reordered lines.

    Args:
        folder: the folder of the files.

    Returns:
        The lines that could be read, and what is wrong with the chain, each with file and line.
    """
    files = [*rotated_files(folder), *[path for path in [folder / FILE] if path.exists()]]
    if not files and not (folder / HEAD).exists():
        raise InputError(f"{folder}: holds no audit log ({FILE})")
    with _locked_head(folder) as file:
        head = None if file is None else read_head(file)
        entries, problems, end = _walk(files)
    if head is None:
        problems.append(f"{HEAD}: missing or damaged; whether the end is missing is unknown")
    elif head.number > end.number:
        problems.append(f"lines {end.number + 1} to {head.number} are missing at the end")
    elif head.number < end.number:
        problems.append(f"lines {head.number + 1} to {end.number} were added after the last one that {HEAD} names")
    elif head.digest != end.digest:
        problems.append(f"line {end.number}, the last one, was changed")
    return entries, problems


def _walk(files: list[Path]) -> tuple[list[dict[str, Any]], list[str], Head]:
    """Read files in order; returns entries, problems, and the end that the lines themselves have."""
    entries: list[dict[str, Any]] = []
    problems: list[str] = []
    end = Head()
    for path in files:
        for place, line in enumerate(path.read_bytes().splitlines(), 1):
            where = f"{path.name}, line {place}"
            entry = _entry(line)
            if entry is None:
                problems.append(f"{where}: is no line of an audit log (expected number {end.number + 1})")
                continue
            number, expected = entry["number"], end.number + 1
            if number > expected:
                problems.append(f"{where}: before it, lines {expected} to {number - 1} are missing")
            elif number < expected:
                problems.append(f"{where}: number {number} again, or out of order: inserted or moved")
            elif entry["previous"] != end.digest:
                before = f"line {end.number} before it was changed" if end.number else "the beginning was changed"
                problems.append(f"{where}: {before}, or this one was replaced")
            entries.append(entry)
            end = Head(max(number, end.number), hashlib.sha256(line).hexdigest())
    return entries, problems, end


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return a line's fields; None if it is none of a chain."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    valid = isinstance(entry, dict) and type(entry.get("number")) is int and isinstance(entry.get("previous"), str)
    return entry if valid else None


def _head_of(line: bytes) -> Head | None:
    """Return the head that a chain has whose last line this is; None if it is none of a chain."""
    if not line:
        return Head()
    entry = _entry(line)
    return None if entry is None else Head(entry["number"], hashlib.sha256(line).hexdigest())


def _previous(line: bytes) -> str:
    entry = _entry(line)
    return "" if entry is None else str(entry["previous"])


def _last_line(folder: Path) -> tuple[bytes, bytes]:
    """Return the last whole line of the chain, and what follows it in the newest file, cut off."""
    rest = b""
    for path in reversed([*rotated_files(folder), folder / FILE]):
        if not path.exists():
            continue
        whole, _, tail = path.read_bytes().rpartition(b"\n")
        rest = tail if path.name == FILE else rest
        if whole:
            return whole.rsplit(b"\n", 1)[-1], rest
    return b"", rest


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def _locked_head(folder: Path, write: bool = False) -> Iterator[Any]:
    """Open the head while no other process appends; yields None if there is none to read."""
    path = folder / HEAD
    if not write and not path.exists():
        yield None
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT if write else os.O_RDONLY, 0o600)
    with open(descriptor, "r+b" if write else "rb", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
        yield file


def _write_head(file: IO[bytes], head: Head) -> None:
    content = json.dumps({"number": head.number, "digest": head.digest}).encode().ljust(_HEAD_BYTES - 1) + b"\n"
    file.seek(0)
    file.write(content)
    os.fsync(file.fileno())
