"""Read CSV, TSV, JSON lines and Parquet files strictly, and check their cells."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from silotune.config.tables import source_name
from silotune.core.files import decode_text, text_lines
from silotune.data.rows import UNREAD, Row, text_fault
from silotune.errors import InputError, file_errors, library_errors

Record = dict[str, Any]
"""A row as its file has it: column → cell. A `Row` (`data/rows.py`) has the texts and the label's index."""

_DELIMITERS = {".csv": ",", ".tsv": "\t"}

FORMATS = (*_DELIMITERS, ".jsonl", ".parquet")

CONLL = ".conll"
"""Lines `token … tag`, sentences parted by blank lines; it is read, but not written."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Endings of compressed files, of any format but Parquet, which compresses by itself."""

_PARQUET_ROWS = 1024
"""Rows of a Parquet file that are in memory at a time."""

_LARGEST_CELL = 2**31 - 1
"""Characters of a cell that the csv module lets pass; its own limit is 131,072."""

# matches only what `int` accepts: ①, ², --1 and thousands of digits do not match
_WHOLE_NUMBER = re.compile(r"-?\d{1,1000}")


def file_format(path: Path) -> tuple[str, str]:
    """Return a file's format and compression by its name, `.csv` and `.gz` for `rows.csv.gz`; empty where unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    kind = suffixes[-1] if suffixes and suffixes[-1] in (*FORMATS, CONLL) else ""
    return ("", "") if compression and kind == ".parquet" else (kind, compression)


def read_records(path: Path, encoding: str = "utf-8", separator: str | None = None) -> list[Record]:
    """Read all rows of a file as dictionaries; arguments as `stream_records`."""
    records = list(stream_records(path, encoding, separator))
    if not records:
        raise InputError(f"{source_name(path)}: no rows")
    return records


def stream_records(
    path: Path, encoding: str = "utf-8", separator: str | None = None, opened: BinaryIO | None = None
) -> Iterator[Record]:
    """Yield the rows of a file as dictionaries; of a file that is not compressed, some are in memory at a time.

    `separator` is between the columns of a table of text; by default what its ending says. `opened` is the file, if it
    is open already.
    """
    if not path.is_file():
        raise InputError(f"{source_name(path)}: not found")
    kind, compression = file_format(path)
    if not kind:
        raise InputError(
            f"{source_name(path)}: unknown format {path.suffix!r}; allowed: {', '.join(FORMATS)}; text also with "
            f"{' or '.join(COMPRESSIONS)} at the end{_array_hint('[' if path.suffix == '.json' else '')}"
        )
    with file_errors(f"{source_name(path)}: cannot be read"), ExitStack() as stack:
        if compression:
            lines = io.StringIO(_text(path, compression, encoding), newline="")
            yield from _parsed(path, kind, lines, separator)
            return
        file = opened or stack.enter_context(path.open("rb"))
        try:
            if kind == ".parquet":
                yield from _parquet(path, file)
            else:
                yield from _parsed(path, kind, text_lines(file, "", encoding), separator)
        except UnicodeDecodeError:
            _text(path, compression, encoding)  # says where
            raise


def _parsed(path: Path, kind: str, lines: Iterable[str], separator: str | None) -> Iterator[Record]:
    if kind in (".jsonl", CONLL):
        return (_json_lines if kind == ".jsonl" else _sentences)(path, lines)
    return _table(path, lines, separator or _DELIMITERS[kind])


def _sentences(path: Path, lines: Iterable[str]) -> Iterator[Record]:
    """Yield the tokens and tags of each sentence: the first and the last column of its lines."""
    tokens: list[str] = []
    tags: list[str] = []
    for number, line in enumerate(chain(lines, [""]), start=1):
        cells = line.split()
        if len(cells) == 1 and cells[0] != "-DOCSTART-":
            raise InputError(f"{source_name(path)}: line {number}: {cells[0]!r} has no tag")
        if cells and cells[0] != "-DOCSTART-":
            tokens.append(cells[0])
            tags.append(cells[-1])
        elif tokens:
            yield {"tokens": tokens, "tags": tags}
            tokens, tags = [], []


def _text(path: Path, compression: str, encoding: str) -> str:
    data = _decompressed(path, COMPRESSIONS[compression]) if compression else path.read_bytes()
    try:
        return decode_text(data, encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        name, hint = (
            ("UTF-8", "; `encoding` names another") if codecs.lookup(encoding).name == "utf-8" else (encoding, "")
        )
        raise InputError(f"{source_name(path)}: line {line}: not {name} (byte {error.start}){hint}") from error


def _decompressed(path: Path, codec: str) -> bytes:
    import pyarrow

    with library_errors(f"{source_name(path)}: not readable as {codec}"):
        if codec == "gzip":
            return gzip.decompress(path.read_bytes())
        with pyarrow.CompressedInputStream(pyarrow.OSFile(str(path), "rb"), codec) as stream:
            return bytes(stream.read())


def _table(path: Path, lines: Iterable[str], delimiter: str) -> Iterator[Record]:
    lines = iter(lines)
    first = next(lines, "")
    reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(_LARGEST_CELL)  # of the whole process
    header: list[str] = []
    number = 0
    try:
        for cells in filter(None, reader):
            if not header:
                header = cells
                for column in header:
                    if header.count(column) > 1:
                        raise InputError(f"{source_name(path)}: column {column!r} appears twice in the header")
                continue
            number += 1
            if len(cells) != len(header):
                raise InputError(
                    f"{source_name(path)}: row {number} has {len(cells)} columns, the header {len(header)}"
                    f"{_separator_hint(header)}"
                )
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        hint = _separator_hint(header or [first.strip()])
        raise InputError(f"{source_name(path)}: line {reader.line_num}: {error}{hint}") from error
    finally:
        csv.field_size_limit(limit)
    if not header:
        raise InputError(f"{source_name(path)}: empty; a header and rows are needed")


def _separator_hint(header: Sequence[str]) -> str:
    """Name the key that is needed where a header of one column holds another separator; else an empty text."""
    other = next((mark for mark in ";\t|," if mark in header[0]), None)
    if len(header) > 1 or other is None:
        return ""
    return (
        f" ({header[0]!r}: columns of .csv are separated by ',', those of .tsv by a tab; "
        f"the silo's key column_separator: {other!r} names another)"
    )


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            raise InputError(f"{source_name(path)}: line {number} is not JSON ({reason}){_array_hint(line)}") from error
        if not isinstance(record, dict):
            raise InputError(f"{source_name(path)}: line {number} is not a JSON object{_array_hint(line)}")
        yield record


def _array_hint(start: str) -> str:
    """Say how an array becomes lines, where one begins; else an empty text."""
    return "; `jq -c '.[]' ARRAY > rows.jsonl` makes lines of an array" if start.lstrip()[:1] == "[" else ""


def _parquet(path: Path, file: BinaryIO) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    with library_errors(f"{source_name(path)}: not a readable Parquet file"):
        # `read_table` would add columns for folders named like `key=value`
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(_PARQUET_ROWS):
            yield from batch.to_pylist()


def require_columns(path: Path, record: Record, columns: Sequence[str]) -> None:
    """Check that a record has all columns."""
    by_case = {str(name).casefold(): name for name in record}
    missing = [
        f"no column {column!r}"
        + (f" (did you mean {by_case[column.casefold()]!r}?)" if column.casefold() in by_case else "")
        for column in columns
        if column not in record
    ]
    if missing:
        available = ", ".join(sorted(map(str, record)))
        hint = _separator_hint([*map(str, record)])
        raise InputError(f"{source_name(path)}: {' and '.join(missing)}; columns: {available}{hint}")


def read_text(path: Path, number: int, record: Record, column: str) -> str:
    """Return the text of one cell."""
    value = record.get(column)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise InputError(f"{source_name(path)}: row {number}: {column!r} is missing or NaN")
    if not isinstance(value, str):
        raise InputError(f"{source_name(path)}: row {number}: {column!r} is not text but {type(value).__name__}")
    if fault := text_fault(value):
        raise InputError(f"{source_name(path)}: row {number}: {column!r} {fault}")
    return value


def read_labels(path: Path, records: Sequence[Record], column: str) -> list[str | int]:
    """Return the labels of all records, as they are in the label column: whole numbers, or stripped text.

    Truth values of JSON and Parquet, if all labels are truth values, become the texts `true` and `false`.
    """
    truth_values = are_all_truth_values(records, column)
    return [read_label(path, number, each, column, truth_values) for number, each in enumerate(records, start=1)]


def are_all_truth_values(records: Sequence[Record], column: str) -> bool:
    """Return whether all cells of a column are truth values of JSON or Parquet."""
    return all(isinstance(record.get(column), bool) for record in records)


def read_label(path: Path, number: int, record: Record, column: str, truth_values: bool) -> str | int:
    """Return the label of one record, as `read_labels` does; `truth_values`: whether those are labels."""
    value = record.get(column)
    if truth_values and isinstance(value, bool):
        value = "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        value = value.strip()
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise InputError(
            f"{source_name(path)}: row {number}: {column!r} is no label: {value!r}; allowed: text, a whole number, "
            "or true and false in all rows"
        )
    return value


def label_names(labels: Iterable[str | int]) -> tuple[str, ...]:
    """Return the distinct labels: in numeric order if all are whole numbers, else alphabetically."""
    names = sorted({str(label) for label in labels})  # a fixed order also for 1 and 01, equal as numbers
    numeric = all(_WHOLE_NUMBER.fullmatch(name) for name in names)
    return tuple(sorted(names, key=int)) if numeric else tuple(names)


def with_groups(path: Path, records: Sequence[Record], rows: Sequence[Row], column: str | None) -> list[Row]:
    """Set each row's `group` to its cell in a column; an empty text if the cell is empty.

    Without a column, rows stay as they are.
    """
    if column is None:
        return list(rows)
    require_columns(path, records[0], [column])
    return [replace(row, group=_group_name(record.get(column))) for row, record in zip(rows, records, strict=True)]


def with_units(
    path: Path, records: Sequence[Record], rows: Sequence[Row], column: str | None, noised: bool
) -> list[Row]:
    """Set each row's `unit` to its cell in a column; without a column rows stay as they are.

    A row whose cell is empty has none. Where noise protects units (`noised`) it is `UNREAD`, and a unit of its own,
    with a blank before its name, which no cell keeps.
    """
    if column is None:
        return list(rows)
    require_columns(path, records[0], [column])
    named = [(row, _group_name(record.get(column))) for row, record in zip(rows, records, strict=True)]
    if not noised:
        return [replace(row, unit=unit) for row, unit in named]
    return [
        replace(row, unit=unit) if unit else replace(row, unit=f" row {number}", label=UNREAD, target=None)
        for number, (row, unit) in enumerate(named, start=1)
    ]


def _group_name(cell: object) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    return str(int(cell) if isinstance(cell, float) and cell.is_integer() else cell).strip()
