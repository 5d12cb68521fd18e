"""`text_columns`: the columns of a table that hold one silo's texts; `table_texts`: the texts, to be predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from silotune.config import Config, SiloConfig
from silotune.data.readers import Record, read_records, read_text, require_columns
from silotune.errors import InputError
from silotune.runs.personal_model import PersonalModel


def own_files(config: Config, silo: str) -> SiloConfig | None:
    """Return a silo's entry of `silos:`; None if its rows are not from files of its own."""
    return next((entry for entry in config.silos if entry.name == silo), None)


def text_columns(
    own: SiloConfig | None, number: int, record: Record, chosen: Sequence[str], option: str
) -> tuple[str, ...]:
    """Return the columns of a row's texts.

    Args:
        own: the silo's entry of `silos:`, if it has one.
        number: how many texts a row of the silo's task has.
        record: a row of the table.
        chosen: the columns that the user names; if empty, those of the silo's own data.
        option: the user's option, for the message.
    """
    columns = tuple(chosen) or (own.columns if own else _usual_columns(number, record))
    if len(columns) != number:
        raise InputError(
            f"{option}: {len(columns)} columns, but a row of this silo's task has {number} "
            f"{'text' if number == 1 else 'texts'}"
        )
    return columns


def table_texts(
    model: PersonalModel, config: Config, silo: str, path: Path, chosen: Sequence[str]
) -> list[str | tuple[str, str]]:
    """Read the texts of a CSV, TSV or Parquet file, a text or a pair a row; other columns are not read.

    Args:
        model: the silo's model.
        config: the run's configuration.
        silo: the silo's name.
        path: the file.
        chosen: its text columns; if empty, those of the silo's own data.
    """
    if model.task.kind == "generation":
        raise InputError(f"--file {path}: a task of generation reads lines of text, or JSON lines (.jsonl), no table")
    own = own_files(config, silo)
    records = read_records(path, own.encoding if own else "utf-8")
    columns = text_columns(own, model.texts_per_row, records[0], chosen, "--columns")
    require_columns(path, records[0], columns)
    rows = [[read_text(path, number, record, column) for column in columns] for number, record in enumerate(records, 1)]
    return [texts[0] if len(texts) == 1 else (texts[0], texts[1]) for texts in rows]


def _usual_columns(number: int, record: Record) -> tuple[str, ...]:
    """Return the text columns of data folders (`data.path`), or `text` if the file has that."""
    if number == 1:
        return ("text",) if "text" in record else ("sentence1",)
    return "sentence1", "sentence2"
