"""Read texts for `predict`: plain lines, pairs around a tab, JSON, or conversations as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from silotune.data.generation_rows import CONVERSATIONS, MESSAGES, asked_row
from silotune.data.rows import text_fault
from silotune.errors import InputError

Text = str | tuple[str, str] | list[dict[str, Any]]
"""A text, a pair, or the turns of a conversation."""


def read_lines(lines: Iterable[str], where: str, texts: tuple[int, ...], conversations: bool = False) -> Iterator[Text]:
    """Yield the texts of lines; empty lines are skipped.

    A line is a text, a pair separated by a tab, or JSON: a string, a list, or an object whose values (except `label`)
    are the texts. If a row has a single text, tabs belong to it.

    Args:
        lines: the lines, with or without line ends.
        where: source of the lines, for messages.
        texts: allowed numbers of texts per row.
        conversations: whether a line may be a JSON object with `messages` or `conversations`.
    """
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        if conversations and (turns := _turns(line)) is not None:
            asked_row(turns, f"{where} line {number}")
            yield turns
            continue
        row_texts = _json(line)
        if row_texts is None:
            row_texts = line.split("\t") if max(texts) > 1 else [line]
        if len(row_texts) not in texts or not all(isinstance(text, str) for text in row_texts):
            wanted = " or ".join("one text" if count == 1 else "two texts, with a tab between" for count in texts)
            raise InputError(f"{where} line {number}: needs {wanted}, or JSON (got {line[:60]!r})")
        required = row_texts[: min(texts)] + [text for text in row_texts[min(texts) :] if text]  # inputs may be empty
        if fault := next(filter(None, map(text_fault, required)), ""):
            raise InputError(f"{where} line {number}: a text {fault}")
        yield row_texts[0] if len(row_texts) == 1 else (row_texts[0], row_texts[1])


def _turns(line: str) -> list[dict[str, Any]] | None:
    """Parse a line with a conversation into its turns; None if it holds none."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    column = next((column for column in (MESSAGES, CONVERSATIONS) if column in value), None)
    return None if column is None else value[column]


def _json(line: str) -> list[Any] | None:
    """Parse a line of JSON into its texts; None if the line is plain text."""
    if line.lstrip()[:1] not in ("[", "{", '"'):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return [text for key, text in value.items() if key != "label"]
    return value if isinstance(value, list) else [value]
