"""A party's records in one SQLite file: an audit log whose lines are chained by sha256, beside tables of its owner.

What is written in one transaction is on disk together or not at all, whenever the process is killed. Each line of the
audit log holds the sha256 of the line before, so that changed, removed and inserted lines are found; whoever can write
the file can also write a whole new chain, which the last line's digest, kept elsewhere, would show.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from silotune.core.clock import utc_now
from silotune.errors import InputError

FILE = "records.db"

_AUDIT = "CREATE TABLE IF NOT EXISTS audit (number INTEGER PRIMARY KEY AUTOINCREMENT, line TEXT NOT NULL)"
# AUTOINCREMENT: SQLite remembers the largest number, so a removed end is noticed

_PATIENCE = 60.0
"""Seconds to wait for another process or thread that writes."""

_START = "0" * 64

SYNCHRONOUS = "FULL"
"""SQLite's setting: a transaction has ended when it is on the disk, not only with the system."""


class Records:
    """The records in a folder; the file is made with its first use. Threads and processes may share it.

    `tables` are statements that create the owner's tables where they are missing.
    """

    def __init__(self, folder: Path, tables: str = "") -> None:
        self.folder = folder
        self._tables = tables
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / FILE

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Write everything inside, or, if it raises, nothing; other writers wait. May be nested."""
        with self._lock, self._errors():
            connection = self._open()
            if connection.in_transaction:
                yield connection
                return
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a query and return all its rows."""
        with self._lock, self._errors():
            return list(map(tuple, self._open().execute(query, values)))

    def append(self, fields: Mapping[str, Any]) -> None:
        """Append a line to the audit log: its number, the time, these fields, and the digest of the line before."""
        with self.transaction() as connection:
            last = connection.execute("SELECT line FROM audit ORDER BY number DESC LIMIT 1").fetchone()
            number = _largest(connection) + 1
            entry = {"number": number, "time": utc_now(), **fields, "previous": _digest(last[0]) if last else _START}
            connection.execute("INSERT INTO audit VALUES (?, ?)", (number, json.dumps(entry)))

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self.path.exists():
            return self._connection
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path.touch(mode=0o600)
        # an isolation level of None: transactions begin and end where `transaction` says so
        self._connection = sqlite3.connect(self.path, _PATIENCE, isolation_level=None, check_same_thread=False)
        self._connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
        self._connection.execute("PRAGMA secure_delete = ON")  # erased secrets are overwritten
        self._connection.executescript(f"BEGIN; {_AUDIT}; {self._tables}; COMMIT")  # one write for all tables
        return self._connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise InputError(f"{self.path}: cannot be read or written ({error}); nothing leaves") from error


def check_audit(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Read an audit log and look for changed, removed, inserted and reordered lines.

    Returns:
        The lines that could be read, and what is wrong with the chain, each with the line's number.
    """
    if not (folder / FILE).exists():
        raise InputError(f"{folder}: holds no records ({FILE})")
    records = Records(folder)
    entries: list[dict[str, Any]] = []
    problems: list[str] = []
    before, digest = 0, _START
    for number, line in records.rows("SELECT number, line FROM audit ORDER BY number"):
        if number > before + 1:
            problems.append(f"lines {before + 1} to {number - 1} are missing")
        entry = _entry(line)
        if entry.get("number") != number:
            problems.append(f"line {number}: is no line of an audit log, or was moved")
        elif number == before + 1 and entry.get("previous") != digest:
            problems.append(f"line {number}: line {before} before it was changed, or this one was replaced")
        if entry:
            entries.append(entry)
        before, digest = number, _digest(line)
    with records.transaction() as connection:
        last = _largest(connection)
    if last > before:
        problems.append(f"lines {before + 1} to {last} are missing at the end")
    records.close()
    return entries, problems


def _entry(line: str) -> dict[str, Any]:
    """Return a line's fields; none if it is no line of an audit log."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _largest(connection: sqlite3.Connection) -> int:
    """Return the largest number that a line of the audit log ever had."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'audit'").fetchone()
    return row[0] if row else 0


def _digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()
