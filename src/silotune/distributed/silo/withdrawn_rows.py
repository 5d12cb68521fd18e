"""Which rows trained which run of a silo, and which were withdrawn, as keyed digests in the silo's own records.

A digest is of a row's texts, whatever their case and white space, under the silo's secret: without that nobody can try
a text against it. Withdrawn rows are left out of later runs; models that were trained before keep what they learned.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from silotune.config.data import SiloConfig
from silotune.core.clock import current_user, utc_now
from silotune.core.records import Records
from silotune.data.generation_rows import find_format, generation_rows
from silotune.data.readers import read_records, read_text, require_columns
from silotune.data.row_checks import SPLITS, text_key
from silotune.data.rows import Row, SiloData, Splits
from silotune.distributed.silo.secret import derived_from_secret
from silotune.errors import InputError

TABLES = """
CREATE TABLE IF NOT EXISTS used (run TEXT, row BLOB, split TEXT, PRIMARY KEY (run, row)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS withdrawn (row BLOB PRIMARY KEY, since TEXT) WITHOUT ROWID;
"""

BEFORE = "before"
"""Stands for a split: the row trained a run with whose model this one began."""

_TRAINED = f"split IN ('train', '{BEFORE}')"

Marks = Mapping[bytes, str]
"""Digest of a row → the split in which it is; a row of several is in the first."""

NOT_UNDONE = (
    "not undone: models trained before keep what they learned of these rows, here, at the coordinator and at the other "
    "silos, and so does a run that starts from one; only a run from the beginning is without them"
)


class RowsRefused(InputError):
    """Rows that a run cannot use, for a reason that may follow from them."""


def marks_of(folder: Path, rows: Sequence[Row]) -> list[bytes]:
    """Return the digests of rows."""
    key = derived_from_secret(folder, "marks of rows")  # a key of its own: noise is drawn from another
    return [hmac.digest(key, json.dumps(list(filter(None, text_key(row)))).encode(), "sha256")[:16] for row in rows]


def without_withdrawn(records: Records, data: SiloData) -> tuple[SiloData, dict[bytes, str], int]:
    """Leave out a silo's withdrawn rows; returns the others, their digests, and how many were left out."""
    withdrawn = {row for (row,) in records.rows("SELECT row FROM withdrawn")}
    marks: dict[bytes, str] = {}
    rest: dict[str, list[Row]] = {}
    for split in SPLITS:
        rows: list[Row] = getattr(data.splits, split)
        of_split = marks_of(records.folder, rows)
        rest[split] = [row for row, mark in zip(rows, of_split, strict=True) if mark not in withdrawn]
        marks = {mark: split for mark in of_split if mark not in withdrawn} | marks
    left_out = sum(data.splits.counts().values()) - sum(map(len, rest.values()))
    if left_out and not rest["train"]:
        raise RowsRefused(f"silo {data.name!r}: all its training rows are withdrawn")
    return replace(data, splits=Splits(**rest)), marks, left_out


def note_use(records: Records, run: str, marks: Marks, before: str) -> None:
    """Record a run's rows and, if it starts from the model of another (`before`), the rows that trained that one."""
    with records.transaction() as connection:
        connection.executemany("INSERT OR IGNORE INTO used VALUES (?, ?, ?)", [(run, *mark) for mark in marks.items()])
        connection.execute(
            f"INSERT OR IGNORE INTO used SELECT ?, row, '{BEFORE}' FROM used WHERE run = ? AND {_TRAINED}",
            (run, before),
        )


def scored_again(records: Records, marks: Marks, before: str) -> int:
    """Return how many validation and test rows trained the earlier run (`before`); arguments as for `note_use`."""
    trained = _trained(records, before)
    return sum(mark in trained and split != "train" for mark, split in marks.items())


def _trained(records: Records, run: str) -> set[bytes]:
    return {row for (row,) in records.rows(f"SELECT row FROM used WHERE run = ? AND {_TRAINED}", run)}


def withdrawn_of(records: Records, run: str) -> int:
    """Return how many withdrawn rows trained a run, or one with whose model it began."""
    query = f"SELECT COUNT(*) FROM used JOIN withdrawn USING (row) WHERE run = ? AND {_TRAINED}"
    return int(records.rows(query, run)[0][0])


def remarks(records: Records, marks: Marks, left_out: int, before: str) -> list[str]:
    """Return lines for the operator about the rows of a run that is to be approved; arguments as for `note_use`."""
    lines = [f"left out as withdrawn: {left_out} rows"] if left_out else []
    if again := scored_again(records, marks, before):
        lines.append(f"scores: {again} validation and test rows trained run {before}, with whose model this one begins")
    if withdrawn := withdrawn_of(records, before):
        lines.append(
            f"withdrawn, and not undone: {withdrawn} rows trained run {before}, with whose model this one begins"
        )
    return lines


def withdraw(records: Records, marks: Sequence[bytes]) -> None:
    """Leave rows out of all runs that begin from now on."""
    with records.transaction() as connection:
        values = [(mark, utc_now()) for mark in marks]
        connection.executemany("INSERT OR IGNORE INTO withdrawn VALUES (?, ?)", values)
        count = len({*marks})
        records.append({"kind": "withdrawn", "reason": f"{count} rows", "user": current_user()})


def uses(records: Records, silo: str, marks: Sequence[bytes] | None = None) -> list[dict[str, Any]]:
    """Return each run with the rows of each split that it used, and its model's folder if that is there still."""
    subset, runs = None if marks is None else {*marks}, dict[str, dict[str, Any]]()
    for run, row, split in records.rows("SELECT run, row, split FROM used ORDER BY run"):
        if subset is None or row in subset:
            model = records.folder / run / "models" / silo
            empty = {"run": run, **dict.fromkeys((*SPLITS, BEFORE), 0), "model": str(model) if model.is_dir() else None}
            runs.setdefault(run, empty)[split] += 1
    return list(runs.values())


def read_withdrawn(path: Path, silo: SiloConfig) -> list[Row]:
    """Read a file of withdrawn rows: the columns of the silo's own rows; labels may be missing."""
    records = read_records(path, silo.encoding, silo.column_separator)
    format = None if {*silo.columns} & records[0].keys() else find_format(records[0])
    if format is not None:
        return generation_rows(path, records, format)
    require_columns(path, records[0], silo.columns)
    return [
        Row(tuple(read_text(path, number, record, column) for column in silo.columns if record.get(column) != ""), 0)
        for number, record in enumerate(records, start=1)
    ]
