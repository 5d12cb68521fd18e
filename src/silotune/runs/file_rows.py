"""Read a user's file or table as rows for one silo's model: texts to be predicted, or labeled rows to be scored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from silotune.data.generation_rows import find_format, generation_rows, instruction_rows
from silotune.data.readers import Record, read_records, read_text, require_columns
from silotune.data.rows import Row
from silotune.data.targets import target_rows
from silotune.errors import InputError
from silotune.runs.personal_model import PersonalModel


def model_records(model: PersonalModel, path: Path) -> Sequence[Record]:
    """Read a file in the encoding of the silo's own files."""
    return read_records(path, (model.about["columns"] or {}).get("encoding", "utf-8"))


def table_texts(model: PersonalModel, path: Path, chosen: Sequence[str]) -> list[str | tuple[str, str]]:
    """Read the texts of a CSV, TSV or Parquet file, a text or a pair a row; other columns are not read.

    Args:
        model: the silo's model.
        path: the file.
        chosen: its text columns; if empty, those of the silo's own data.
    """
    if model.task.kind == "generation":
        raise InputError(f"--file {path}: a task of generation reads lines of text, or JSON lines (.jsonl), no table")
    records = model_records(model, path)
    columns = _text_columns(model, records[0], chosen, "--columns")
    require_columns(path, records[0], columns)
    rows = [[read_text(path, number, record, column) for column in columns] for number, record in enumerate(records, 1)]
    return [texts[0] if len(texts) == 1 else (texts[0], texts[1]) for texts in rows]


def labeled_rows(
    model: PersonalModel, path: Path, records: Sequence[Record], text: Sequence[str], label: str
) -> list[Row]:
    """Make rows of the model's task of a table's records.

    Args:
        model: the silo's model.
        path: the file, for messages.
        records: its rows.
        text: the text columns; if empty, those of the silo's own data.
        label: the label column; if empty, that of the silo's own data.
    """
    task, own = model.task, model.about["columns"]
    if task.kind == "generation":
        columns = tuple(text) or tuple(own["text"] if own else ())
        answer = label or (own["label"] if own else "")
        format = None if {*columns, answer} & records[0].keys() else find_format(records[0])
        return generation_rows(path, records, format) if format else instruction_rows(path, records, columns, answer)
    columns = _text_columns(model, records[0], text, "--text")
    label = label or (own["label"] if own else "label")
    separator = own["separator"] if own else None
    return target_rows(path, records, columns, label, task, by_index=own is None, separator=separator)


def _text_columns(model: PersonalModel, record: Record, chosen: Sequence[str], option: str) -> tuple[str, ...]:
    """Return the columns of a row's texts: the user's, the silo's own, or the usual ones; `option` is for messages."""
    own, number = model.about["columns"], model.texts_per_row
    usual = ("text",) if number == 1 and "text" in record else ("sentence1", "sentence2")[:number]
    columns = tuple(chosen) or tuple(own["text"] if own else usual)
    if len(columns) != number:
        raise InputError(
            f"{option}: {len(columns)} columns, but a row of this silo's task has {number} "
            f"{'text' if number == 1 else 'texts'}"
        )
    return columns
