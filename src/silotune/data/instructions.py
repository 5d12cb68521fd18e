"""`generation_rows` makes rows of instructions, prompts or conversations; `find_format` tells which by columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from silotune.data.conversations import (
    CHOSEN,
    CONVERSATIONS,
    MESSAGES,
    PROMPT,
    REJECTED,
    conversation_rows,
    preference_rows,
)
from silotune.data.readers import Record, read_text, require_columns
from silotune.data.rows import Row

INSTRUCTION, INPUT, OUTPUT, RESPONSE = "instruction", "input", "output", "response"

Format = Literal["conversations", "preferences", "instructions", "prompts"]

_COLUMNS: tuple[tuple[Format, tuple[str, ...]], ...] = (
    ("instructions", (INSTRUCTION, OUTPUT)),
    ("conversations", (MESSAGES,)),
    ("conversations", (CONVERSATIONS,)),
    ("preferences", (CHOSEN, REJECTED)),
    ("prompts", (PROMPT, RESPONSE)),
)
"""The columns by which a format is known, in the order in which they are looked for."""


def find_format(record: Record) -> Format | None:
    """Return the format of generation data with these columns; None for labeled texts and unknown columns."""
    if "label" in record:
        return None
    return next((name for name, columns in _COLUMNS if {*columns} <= record.keys()), None)


def generation_rows(path: Path, records: Sequence[Record], format: Format) -> list[Row]:
    """Make the rows of a generation task in one of the known formats.

    Args:
        path: the file, for messages.
        records: rows of the file.
        format: from `find_format`.
    """
    return _READERS[format](path, records)


def instruction_rows(
    path: Path, records: Sequence[Record], text: Sequence[str] = (INSTRUCTION, INPUT), output: str = OUTPUT
) -> list[Row]:
    """Make the rows of a generation task.

    Args:
        path: the file, for messages.
        records: rows of the file.
        text: the instruction's column and, optionally, the input's.
        output: column of the reference text.
    """
    instruction, *input_columns = text
    require_columns(path, records[0], [instruction, output])
    rows = []
    for number, record in enumerate(records, start=1):
        inputs = [
            read_text(path, number, record, column) for column in input_columns if record.get(column) not in (None, "")
        ]
        texts = (read_text(path, number, record, instruction), *(inputs or [""]))
        rows.append(Row(texts, 0, read_text(path, number, record, output)))
    return rows


def _prompt_rows(path: Path, records: Sequence[Record]) -> list[Row]:
    return instruction_rows(path, records, (PROMPT,), RESPONSE)


_READERS: Mapping[Format, Callable[[Path, Sequence[Record]], list[Row]]] = {
    "conversations": conversation_rows,
    "preferences": preference_rows,
    "instructions": instruction_rows,
    "prompts": _prompt_rows,
}


def row_format(row: Row) -> str:
    """Return in words the format of a generation task's row, for people."""
    if row.rejected:
        return "preference pairs"
    return "conversations" if row.turns else "instructions"


def lists_options(row: Row) -> bool:
    """Whether the row's text lists its answer as an option, on a line `- answer`."""
    return any(line.strip() == f"- {row.answer.strip()}" for text in row.texts for line in text.splitlines())
