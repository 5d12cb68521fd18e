"""Texts to classify, one a line: plain, two with a tab between, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from silotune.data.text_checks import text_fault
from silotune.errors import InputError

Text = str | tuple[str, str]


def read_lines(lines: Iterable[str], where: str, texts: tuple[int, ...]) -> Iterator[Text]:
    """The texts of lines; empty lines are passed over.

    A line is a text, or two with a tab between; or JSON: a string, a list, or an object whose values are the texts.
    Where a row is a single text, tabs belong to it.

    Args:
        lines: as read, with or without line ends.
        where: what they come from, for complaints.
        texts: how many texts a row may have.

    Raises:
        InputError: naming the line, where it has another number of texts, or one that cannot be tokenized.
    """
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        found = _json(line)
        if found is None:
            found = line.split("\t") if max(texts) > 1 else [line]
        if len(found) not in texts or not all(isinstance(text, str) for text in found):
            wanted = " or ".join("one text" if count == 1 else "two texts, with a tab between" for count in texts)
            raise InputError(f"{where} line {number}: needs {wanted}, or JSON (got {line[:60]!r})")
        needed = found[: min(texts)] + [text for text in found[min(texts) :] if text]  # an input may be left empty
        if fault := next(filter(None, map(text_fault, needed)), ""):
            raise InputError(f"{where} line {number}: a text {fault}")
        yield found[0] if len(found) == 1 else (found[0], found[1])


def _json(line: str) -> list[Any] | None:
    """The texts of a line of JSON; None for a line that is something else."""
    if line.lstrip()[:1] not in ("[", "{", '"'):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict):
        return [value for key, value in found.items() if key != "label"]
    return found if isinstance(found, list) else [found]
