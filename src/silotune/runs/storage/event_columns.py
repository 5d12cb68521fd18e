"""`write_event_columns` writes `events.parquet`: a run's events in columns, where there are very many."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any

from silotune.runs.storage.readers import EVENTS, events

COLUMNS_FILE = "events.parquet"

LEAST = 100_000
"""Events from which on a run gets the file: about where reading the lines takes seconds."""

_AT_ONCE = 50_000
"""Events in memory at a time: a row group of the file."""


def write_event_columns(run: Path, least: int = LEAST) -> Path | None:
    """Write a run's events as one Parquet file, beside the lines and from them; `event` says what a row is.

    A field is a column: of numbers (float64), of whole numbers (int64), of truth values, or of text; null where an
    event does not have it. Fields that hold lists or objects, and fields of several types, are JSON text.

    Args:
        run: the run folder.
        least: number of events with which the file is made; with fewer it is removed, if it is there.

    Returns:
        The file; None where there are too few events.
    """
    path = run / COLUMNS_FILE
    if not _has_lines(run / EVENTS, least):
        path.unlink(missing_ok=True)
        return None
    import pyarrow
    import pyarrow.parquet

    types = _types(events(run))
    kinds = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64()}
    schema = pyarrow.schema({name: kinds.get(kind, pyarrow.string()) for name, kind in types.items()})
    temporary, rows = path.with_name(f".{path.name}.tmp"), events(run)
    with pyarrow.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        while batch := [*islice(rows, _AT_ONCE)]:
            columns = {name: [_cell(row.get(name), kind) for row in batch] for name, kind in types.items()}
            writer.write_table(pyarrow.table(columns, schema))
    temporary.replace(path)
    return path


def _has_lines(path: Path, least: int) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return sum(1 for _ in islice(file, least)) >= least


def _types(rows: Iterable[dict[str, Any]]) -> dict[str, type]:
    """Return each field's type, fields in order of appearance; `object` where it is JSON text."""
    types: dict[str, type] = {}
    for row in rows:
        for name, value in row.items():
            kind = type(value) if isinstance(value, (bool, int, float, str, NoneType)) else object
            known = types.setdefault(name, kind)
            if known is NoneType:
                types[name] = kind
            elif known is not kind and kind is not NoneType:
                types[name] = float if {known, kind} == {int, float} else object
    return types


def _cell(value: Any, kind: type) -> Any:
    """Return a value as its column has it."""
    return json.dumps(value, ensure_ascii=False) if kind is object and value is not None else value
