"""Write labels in place of the spans that a silo's model marks, piece by piece of a file of any length."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from silotune.core.files import text_lines
from silotune.data.readers import file_format, stream_records
from silotune.errors import InputError
from silotune.runs.personal_model import PersonalModel
from silotune.runs.release import exact_interval
from silotune.runs.storage.scored_rows import read_test_scores

_AT_ONCE = 256
"""Texts that are marked together."""

_LONGEST = 20_000
"""Characters of a line from which on it is cut at blanks, so that a file without line ends needs no more memory."""

_AROUND = 2_000
"""Characters before and behind such a cut that the model reads, too."""

Piece = tuple[str, str, str]
"""What stands before a piece of text, the piece, and what stands behind it; the two beside it are read alone."""


def recall_text(run: Path, silo: str) -> str:
    """Say how many of the silo's true spans the model's marks cover as a whole, on its test rows, with an interval."""
    scores = read_test_scores(run) or {}
    details = (scores.get("silos") or {}).get(silo) or scores.get("global") or {}
    recall = (details.get("metrics") or {}).get("span_recall")
    if recall is None:
        return "recall on test rows: not known, as they have no spans; what is not found stays readable"
    low, high = (details.get("intervals") or {}).get("span_recall") or (None, None)
    if recall in (0, 100):  # every resample has the same score, which says nothing of rows that are not there
        spans = sum(of_label["rows"] for of_label in (details.get("per_class") or {}).values())
        count = min(details["rows"], spans or details["rows"])  # rows without a span tell nothing
        low, high = (100 * bound for bound in exact_interval(round(count * recall / 100), count))
    bounds = "" if low is None else f" (95 % interval {low:.1f} to {high:.1f})"
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
        number = 0
        for text, line_ends in _replaced(model, _pieces(text_lines(opened)), counts):
            out.write(text)
            number += line_ends
        return number, counts
    records, own = stream_records(path, opened=opened), model.about["columns"]
    column = column or (str(own["text"][0]) if own else "text")
    return _records(model, records, path, column, text_writer(kind, out), counts), counts


def _records(
    model: PersonalModel,
    records: Iterator[dict[str, Any]],
    path: Path,
    column: str,
    write: Callable[[list[dict[str, Any]]], None],
    counts: Counter[str],
) -> int:
    number = 0
    while batch := list(islice(records, _AT_ONCE)):
        for place, record in enumerate(batch, number + 1):
            if not isinstance(record.get(column, ""), str | None):
                raise InputError(f"{path}: row {place}: {column!r} is no text")
            if column not in record:
                raise InputError(f"{path}: row {place}: no column {column!r}; there: {', '.join(map(str, record))}")
        texts = (("", record[column] or "", "") for record in batch)
        pairs = zip(batch, _replaced(model, texts, counts), strict=True)
        write([record | {column: text} if record[column] else record for record, (text, _) in pairs])
        number += len(batch)
    return number


def _replaced(model: PersonalModel, pieces: Iterable[Piece], counts: Counter[str]) -> Iterator[tuple[str, bool]]:
    """Yield each piece with labels in place of spans, and whether it ends a line.

    A span that goes on in the next piece is written where it begins, and left out there.
    """
    stream, beyond = iter(pieces), 0
    while batch := list(islice(stream, _AT_ONCE)):
        for (before, piece, _), prediction in zip(batch, model.predict([*map("".join, batch)]), strict=True):
            text, end = before + piece, len(before + piece)
            start, written = len(before) + beyond, []
            for span in prediction.spans or ():
                if start < span.end and span.start < end:
                    written += [text[start : span.start], f"[{span.label}]"]
                    start = span.end
                    counts[span.label] += 1
            beyond = max(0, start - end)
            yield "".join([*written, text[start:]]), piece.endswith(("\n", "\r"))


def text_writer(kind: str, out: TextIO) -> Callable[[list[dict[str, Any]]], None]:
    """Return what writes records as lines of JSON, or as rows of a table behind a header, nested values as JSON."""
    table, named = csv.writer(out, delimiter="\t" if kind == ".tsv" else ","), list[bool]()

    def write(records: list[dict[str, Any]]) -> None:
        if kind == ".jsonl":
            out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            return
        if not named:
            named.append(True)
            table.writerow(records[0])
        table.writerows(map(cell, record.values()) for record in records)

    return write


def cell(value: Any) -> Any:
    """Return a value as a table's cell has it: what is neither text nor a number as JSON."""
    return value if isinstance(value, str | int | float | None) else json.dumps(value, ensure_ascii=False)


def _pieces(lines: TextIO) -> Iterator[Piece]:
    """Yield lines with their ends; long ones are cut behind a blank, or else anywhere."""
    before = rest = ""
    for part in chain(iter(lambda: lines.readline(_LONGEST), ""), [""]):
        rest += part
        ended = not part or rest.endswith(("\n", "\r"))
        while rest and (ended or len(rest) >= _LONGEST + _AROUND):
            text = rest
            if len(rest) >= _LONGEST + _AROUND:
                cut = max((match.end() for match in re.finditer(r"\s", rest[:_LONGEST])), default=0)
                text = rest[: cut if cut >= _LONGEST // 2 else _LONGEST]
            rest = rest[len(text) :]
            yield before, text, rest[:_AROUND]
            before = (before + text)[-_AROUND:] if rest or not ended else ""
