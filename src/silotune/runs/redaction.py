"""Write labels in place of the spans that a silo's model marks, piece by piece of a file of any length."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from silotune.core.files import text_lines
from silotune.data.readers import file_format, stream_records
from silotune.errors import InputError
from silotune.runs.personal_model import PersonalModel
from silotune.runs.storage.scored_rows import read_test_scores

_AT_ONCE = 256
"""Texts that are marked together."""

_LONGEST = 20_000
"""Characters of a line from which on it is cut at blanks, so that a file without line ends needs no more memory."""


def recall_text(run: Path, silo: str, level: int = 95) -> str:
    """Say how many of the silo's true spans the model's marks cover as a whole, on its test rows, with an interval."""
    scores = read_test_scores(run) or {}
    details = (scores.get("silos") or {}).get(silo) or scores.get("global") or {}
    recall = (details.get("metrics") or {}).get("span_recall")
    if recall is None:
        return "recall on test rows: not known, as they have no spans; what is not found stays readable"
    low, high = (details.get("intervals") or {}).get("span_recall") or (None, None)
    bounds = "" if low is None else f" ({level} % interval {low:.1f} to {high:.1f})"
    return (
        f"recall on {details['rows']:,} test rows: {recall:.1f} % of spans are marked as a whole{bounds}; "
        "the others stay readable"
    )


def redact(
    model: PersonalModel, path: Path, opened: BinaryIO, out: TextIO, column: str | None = None
) -> tuple[int, Counter[str]]:
    """Write a file with `[LABEL]` in place of each span: text, or one column of a table or of JSON lines.

    Everything else stays as it is, line ends of a text file included.

    Returns:
        The number of lines or rows, and how many spans of each label are replaced.
    """
    if not model.task.rules.by_position:
        raise InputError(f"redact: task {model.task.name!r} holds {model.task.rules.rows}; allowed: kind=entities")
    kind, compression = file_format(path)
    if kind == ".parquet" or compression:
        raise InputError(f"redact: {path}: allowed are text, .csv, .tsv and .jsonl, not compressed")
    counts: Counter[str] = Counter()
    if not kind:
        if column is not None:
            raise InputError("--column: belongs to a .csv, .tsv or .jsonl file")
        pieces, number = _pieces(text_lines(opened)), 0
        while batch := list(islice(pieces, _AT_ONCE)):
            out.writelines(_replaced(model, batch, counts))
            number += sum(piece.endswith(("\n", "\r")) for piece in batch)
        return number, counts
    records = stream_records(path, opened=opened)
    return _records(model, records, path, column or _own_column(model), _writer(kind, out), counts), counts


def _records(
    model: PersonalModel,
    records: Iterator[dict[str, Any]],
    path: Path,
    column: str,
    write: Callable[[dict[str, Any]], object],
    counts: Counter[str],
) -> int:
    number = 0
    while batch := list(islice(records, _AT_ONCE)):
        for place, record in enumerate(batch, number + 1):
            if not isinstance(record.get(column, ""), str | None):
                raise InputError(f"{path}: row {place}: {column!r} is no text")
            if column not in record:
                raise InputError(f"{path}: row {place}: no column {column!r}; there: {', '.join(map(str, record))}")
        texts = [record[column] or "" for record in batch]
        for record, text in zip(batch, _replaced(model, texts, counts), strict=True):
            write(record | {column: text} if record[column] else record)
        number += len(batch)
    return number


def _own_column(model: PersonalModel) -> str:
    own = model.about["columns"]
    return str(own["text"][0]) if own else "text"


def _replaced(model: PersonalModel, texts: list[str], counts: Counter[str]) -> Iterator[str]:
    for text, prediction in zip(texts, model.predict(texts), strict=True):
        kept, start = [], 0
        for span in prediction.spans or ():
            kept += [text[start : span.start], f"[{span.label}]"]
            start = span.end
            counts[span.label] += 1
        yield "".join([*kept, text[start:]])


def _writer(kind: str, out: TextIO) -> Callable[[dict[str, Any]], object]:
    """Return what writes a record as a line of JSON, or as a row of a table behind a header."""
    if kind == ".jsonl":
        return lambda record: out.write(json.dumps(record, ensure_ascii=False) + "\n")
    table, named = csv.writer(out, delimiter="\t" if kind == ".tsv" else ","), list[bool]()

    def write(record: dict[str, Any]) -> None:
        if not named:
            named.append(True)
            table.writerow(record)
        table.writerow(record.values())

    return write


def _pieces(lines: TextIO) -> Iterator[str]:
    """Yield lines with their ends; long ones are cut behind a blank, or else anywhere."""
    rest = ""
    for part in chain(iter(lambda: lines.readline(_LONGEST), ""), [""]):
        rest += part
        if len(rest) >= _LONGEST and not rest.endswith(("\n", "\r")):
            cut = max((match.end() for match in re.finditer(r"\s", rest)), default=0)
            cut = cut if cut >= _LONGEST // 2 else len(rest)
            yield rest[:cut]
            rest = rest[cut:]
        elif rest and (not part or rest.endswith(("\n", "\r"))):
            yield rest
            rest = ""
