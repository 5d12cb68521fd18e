"""The coordinator's `coordinator.db`: its runs, the nodes of its silos, and the invitations that it gave out."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from silotune.errors import InputError

_TABLES = (
    """create table if not exists runs (
        number integer primary key, out text not null unique, method text not null, rounds integer not null,
        silos text not null, state text not null, flower_id text not null default '', submissions integer not null
        default 0, failures integer not null default 0, reached text not null default '', stop integer not null
        default 0, queued text not null, began text not null default '', ended text not null default '',
        error text not null default '')""",
    "create table if not exists nodes (silo text primary key, node text not null, key_sha256 text not null)",
    """create table if not exists invitations (
        silo text primary key, token_sha256 text not null, expires text not null, replace integer not null,
        key_sha256 text)""",
)

PATIENCE = 60.0
"""Seconds to wait for another process that changes the database."""


@contextmanager
def transaction(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the database in a coordinator's folder for one transaction, which is undone if the block raises."""
    path = folder / "coordinator.db"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)) as database:
            database.row_factory = sqlite3.Row
            database.execute("begin immediate")
            for table in _TABLES:
                database.execute(table)
            try:
                yield database
            except BaseException:
                database.rollback()
                raise
            database.commit()
    except (sqlite3.OperationalError, sqlite3.DatabaseError, OSError) as error:
        raise InputError(f"{path}: cannot be used ({error})") from error
