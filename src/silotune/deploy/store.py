"""The coordinator's records: its runs, the nodes of its silos, the invitations it gave out, and who decided what."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from silotune.core.clock import current_user
from silotune.core.records import Records

_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    number INTEGER PRIMARY KEY, out TEXT NOT NULL UNIQUE, method TEXT NOT NULL, rounds INTEGER NOT NULL,
    silos TEXT NOT NULL, state TEXT NOT NULL, flower_id TEXT NOT NULL DEFAULT '',
    submissions INTEGER NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0, reached TEXT NOT NULL DEFAULT '',
    stop INTEGER NOT NULL DEFAULT 0, queued TEXT NOT NULL, began TEXT NOT NULL DEFAULT '',
    ended TEXT NOT NULL DEFAULT '', error TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS nodes (silo TEXT PRIMARY KEY, node TEXT NOT NULL, key_sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS invitations (
    silo TEXT PRIMARY KEY, token_sha256 TEXT NOT NULL, expires TEXT NOT NULL, replace INTEGER NOT NULL,
    key_sha256 TEXT);
"""


@contextmanager
def transaction(folder: str | Path) -> Iterator[sqlite3.Connection]:
    """Open the records in a coordinator's folder for one transaction, which is undone if the block raises."""
    with closing(Records(Path(folder), _TABLES)) as records, records.transaction() as database:
        database.row_factory = sqlite3.Row
        yield database


def record_decision(folder: str | Path, kind: str, **fields: str) -> None:
    """Record what the coordinator's operator did in the audit log of its folder, and who it was."""
    with closing(Records(Path(folder), _TABLES)) as records:
        records.append({"kind": kind, **fields, "user": current_user()})
