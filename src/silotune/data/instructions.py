"""Makes rows of instruction data: an instruction, an optional input, and the output to generate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from silotune.data.readers import Record, read_text, require_columns
from silotune.data.tasks import Row

INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"


def are_instructions(records: Sequence[Record]) -> bool:
    """Whether a task folder's rows are instructions rather than labeled texts."""
    return INSTRUCTION in records[0] and OUTPUT in records[0] and "label" not in records[0]


def instruction_rows(
    path: Path, records: Sequence[Record], text: Sequence[str] = (INSTRUCTION, INPUT), output: str = OUTPUT
) -> list[Row]:
    """Make the rows of a generation task.

    Args:
        path: the file, for messages.
        records: rows of the file.
        text: the instruction's column and, optionally, the input's.
        output: column of the reference text.

    Raises:
        InputError: a column is missing, or an instruction or output is missing, empty or no text.
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


def lists_options(row: Row) -> bool:
    """Whether the row's text lists its answer as an option, on a line `- answer`."""
    return any(line.strip() == f"- {row.answer.strip()}" for text in row.texts for line in text.splitlines())
