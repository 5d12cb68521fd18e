"""`write_event_columns` writes `events.parquet`: a run's events in columns, where there are very many."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any

from silotune.runs.storage.readers import EVENTS, events

COLUMNS_FILE = "events.parquet"

LEAST = 100_000
"""Events from which on a run gets the file: about where reading the lines takes seconds."""

_AT_ONCE, _MOST_CELLS, _MOST_TEXT = 50_000, 2_000_000, 64 * 2**20
"""Events in memory at a time, a row group of the file, their fields and characters of their text."""

_INTEGERS = 2**63


def write_event_columns(run: Path, warn: Callable[[str], None] | None = None, least: int = LEAST) -> Path | None:
    """Write a run's events as one Parquet file, beside the lines and from them; `event` says what a row is.

    A field is a column: of numbers (float64), of whole numbers (int64), of truth values, or of text; null where an
    event does not have it. Fields that hold lists or objects, and fields of several types, are JSON text. Where the
    file cannot be written there is none, as it is only another form of what is there.

    Args:
        run: the run folder.
        warn: called with the reason if the file cannot be written.
        least: number of events with which the file is made; with fewer it is removed, if it is there.

    Returns:
        The file; None where there are too few events, or it cannot be written.
    """
    path = run / COLUMNS_FILE
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)
        if not _has_lines(run / EVENTS, least):
            return None
        _write(run, temporary)
        temporary.replace(path)
    except Exception as error:  # of the disk, or of contents that nobody foresaw: the run itself is finished
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if warn is not None:
            reason = str(error).partition("\n")[0][:200]
            warn(f"{path} is not written ({type(error).__name__}: {reason}); events.jsonl has all events")
        return None
    return path


def _write(run: Path, path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    types = _types(events(run))
    kinds = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64()}
    schema = pyarrow.schema({name: kinds.get(kind, pyarrow.string()) for name, kind in types.items()})
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for rows in _batches(events(run), types):
            columns = dict(zip(types, zip(*rows, strict=True), strict=True))
            writer.write_table(pyarrow.table({name: [*cells] for name, cells in columns.items()}, schema))


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
            kind = _type(value)
            known = types.setdefault(name, kind)
            if known is NoneType:
                types[name] = kind
            elif known is not kind and kind is not NoneType:
                types[name] = float if {known, kind} == {int, float} else object
    return types


def _type(value: Any) -> type:
    """Return a value's type as a column's; `object` if it is only known as JSON text."""
    if isinstance(value, int) and not -_INTEGERS <= value < _INTEGERS:
        return object
    return type(value) if isinstance(value, (bool, int, float, str, NoneType)) else object


def _batches(rows: Iterable[dict[str, Any]], types: dict[str, type]) -> Iterator[list[list[Any]]]:
    """Yield rows of cells, in pieces of bounded size."""
    batch: list[list[Any]] = []
    text = 0
    for row in rows:
        batch.append([_cell(row.get(name), kind) for name, kind in types.items()])
        text += sum(len(cell) for cell in batch[-1] if isinstance(cell, str))
        if len(batch) >= _AT_ONCE or len(batch) * len(types) >= _MOST_CELLS or text > _MOST_TEXT:
            yield batch
            batch, text = [], 0
    if batch:
        yield batch


def _cell(value: Any, kind: type) -> Any:
    """Return a value as its column has it; what is no text in UTF-8 is replaced."""
    if value is None:
        return None
    if kind is object:
        return json.dumps(value)
    if kind is float:
        return float(value)
    return value.encode("utf-8", "replace").decode() if kind is str else value
