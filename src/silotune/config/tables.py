"""Take tables of Python (`run(silos={"a": frame})`) as silos' rows; they are kept here under their digest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from silotune.errors import InputError

MEMORY_PREFIX = "memory:"
"""How the path of a silo's table begins; the digest of its rows follows."""

Table = Any
"""A pandas DataFrame, a `datasets.Dataset`, a pyarrow or polars table, or a list of dictionaries."""

Rows = list[dict[str, Any]]
"""Column → cell, for each row."""

SPLITS = ("train", "validation", "test")

_kept: dict[str, dict[str, Rows]] = {}
"""Digest → split → rows."""


def silo_entries(silos: object) -> object:
    """Return the key `silos` as a configuration file may have it: a path takes the place of each table given in Python.

    `silos` maps each silo to its table (or to split → table), or lists groups of keys, each with a table in `rows`.
    """
    if isinstance(silos, Mapping):
        return [{"name": str(name), "path": keep(value, f"silos.{name}")} for name, value in silos.items()]
    if not isinstance(silos, (list, tuple)):
        return silos
    return [_entry(silo, f"silos.{place}") for place, silo in enumerate(silos)]


def _entry(silo: object, key: str) -> object:
    if not isinstance(silo, Mapping) or "rows" not in silo:
        return silo
    if "path" in silo:
        raise InputError(f"{key}: 'rows' and 'path' exclude each other; give one of them")
    others = {name: value for name, value in silo.items() if name != "rows"}
    return others | {"path": keep(silo["rows"], f"{key}.rows")}


def keep(table: object, key: str) -> str:
    """Keep a table, or split → table, in this process; return the path that names it."""
    if isinstance(table, Mapping):
        if "train" not in table or not {*table} <= {*SPLITS}:
            raise InputError(
                f"{key}: must be a table, or tables by split: train, and validation and test if it has any"
            )
        splits = {split: table_rows(table[split], f"{key}.{split}") for split in SPLITS if split in table}
    else:
        splits = {"train": table_rows(table, key)}
    digest = sha256(json.dumps(splits, sort_keys=True, default=str, ensure_ascii=False).encode()).hexdigest()[:16]
    _kept[digest] = splits
    return MEMORY_PREFIX + digest


def kept_rows(path: str) -> dict[str, Rows]:
    """Return a copy of the rows of a table given in Python, by split."""
    splits = _kept.get(path.removeprefix(MEMORY_PREFIX))
    if splits is None:
        raise InputError(
            f"{path}: these rows were in the memory of another process; give them again in Python (with workers=1), or "
            "the path of a file"
        )
    return {split: [dict(row) for row in rows] for split, rows in splits.items()}


def source_name(path: str | Path) -> str:
    """Return how messages name where rows are from: `data file PATH`, or `the table` if Python gave them."""
    return "the table" if str(path).startswith(MEMORY_PREFIX) else f"data file {path}"


def table_rows(table: Table, key: str) -> Rows:
    """Return a table's rows, with the values that Parquet would give."""
    import pyarrow

    kind = type(table).__module__.partition(".")[0]
    try:
        if kind == "pandas":
            table = pyarrow.Table.from_pandas(table, preserve_index=False)
        elif kind == "datasets":
            table = _named_labels(table)
        for method in ("to_pylist", "to_list", "to_dicts"):  # of pyarrow, datasets, polars
            if not isinstance(table, (list, tuple)) and hasattr(table, method):
                table = getattr(table, method)()
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"{key}: cannot be read ({(str(error).splitlines() or [type(error).__name__])[0]})") from error
    if not isinstance(table, Sequence) or not all(isinstance(row, Mapping) for row in table):
        raise InputError(
            f"{key}: must be a table: a pandas DataFrame, a datasets.Dataset, a pyarrow or polars table, or a list of "
            f"dictionaries (got {type(table).__name__})"
        )
    if not table:
        raise InputError(f"{key}: no rows")
    return [{str(column): cell for column, cell in row.items()} for row in table]


def _named_labels(dataset: Any) -> Any:
    rows: Rows = dataset.to_list()
    for column, feature in dataset.features.items():
        if hasattr(feature, "int2str"):
            for row in rows:
                row[column] = feature.int2str(row[column]) if row[column] is not None and row[column] >= 0 else None
    return rows
