"""Instruction rows: an instruction, an input that may be empty or missing, and the output to write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from silotune.data.readers import Record, read_text, require_columns
from silotune.data.tasks import Row

INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"


def are_instructions(records: Sequence[Record]) -> bool:
    """Whether rows of a task folder are instructions rather than labeled texts."""
    return INSTRUCTION in records[0] and OUTPUT in records[0] and "label" not in records[0]


def instruction_rows(
    path: Path, records: Sequence[Record], text: Sequence[str] = (INSTRUCTION, INPUT), output: str = OUTPUT
) -> list[Row]:
    """Rows of a generation task.

    Args:
        path: for messages.
        records: as read.
        text: the instruction's column and, where there is one, the input's.
        output: the column of what is to be written.

    Raises:
        InputError: for a missing column, or an instruction or output that is missing, empty or no text.
    """
    instruction, *more = text
    require_columns(path, records[0], [instruction, output])
    rows = []
    for number, record in enumerate(records, start=1):
        given = [read_text(path, number, record, column) for column in more if record.get(column) not in (None, "")]
        texts = (read_text(path, number, record, instruction), *(given or [""]))
        rows.append(Row(texts, 0, read_text(path, number, record, output)))
    return rows


def lists_options(row: Row) -> bool:
    """Whether the row's text lists its answer among options, one a line: `- answer`."""
    return any(line.strip() == f"- {row.answer.strip()}" for text in row.texts for line in text.splitlines())
