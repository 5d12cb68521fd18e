"""`score_rows` scores one silo's model of a finished run on a labeled file or table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from silotune.config import SiloConfig
from silotune.config.tables import MEMORY_PREFIX, Table, table_rows
from silotune.data.generation_rows import find_format, generation_rows, instruction_rows
from silotune.data.readers import Record, read_records
from silotune.data.rows import Row
from silotune.data.targets import target_rows
from silotune.errors import InputError
from silotune.evaluation.bootstrap import LEVEL, Bootstrap
from silotune.evaluation.predict import logits, measure
from silotune.evaluation.score_details import score_details
from silotune.runs.build.resolve import read_config
from silotune.runs.load import load_model
from silotune.runs.personal_model import PersonalModel
from silotune.runs.storage.readers import read_summary
from silotune.runs.storage.scored_rows import write_predictions
from silotune.runs.text_columns import own_files, text_columns

TABLE = "rows"
"""What stands for the file's name where a table was given; a file's name has an ending."""


def score_rows(
    run: Path,
    silo: str,
    source: str | Path | Table,
    *,
    text: Sequence[str] = (),
    label: str = "",
    predictions: str | Path | None = None,
    resamples: int = 1000,
) -> dict[str, Any]:
    """Score one silo's model on the rows of a labeled file or table.

    Args:
        run: the folder of a finished run.
        silo: the silo's name.
        source: a CSV, TSV, JSON lines or Parquet file, or a table.
        text: the text column, or the two of a pair; by default those of the silo's own data.
        label: the label column, or that of the answers; by default that of the silo's own data.
        predictions: a file for the prediction of every row, as `predictions.parquet` of a run.
        resamples: of the rows, for intervals; 0 makes none.

    Returns:
        `silo`, `level` of the intervals, and the details of `evaluation/score_details.py`.
    """
    path = Path(source) if isinstance(source, (str, Path)) else Path(MEMORY_PREFIX + TABLE)
    read_summary(run)  # says what is wrong where no finished run is
    config = read_config(str(run / "config.yaml"))
    own = own_files(config, silo)
    if isinstance(source, (str, Path)):
        records = read_records(path, own.encoding if own else "utf-8")
    else:
        records = table_rows(source, TABLE)
    model = load_model(run, silo)
    rows = _rows(model, path, records, own, text, label)
    context = model.context
    tokenized = context.method.setting.head.row_tokenizer(context.backbone, context.train.max_length)(model.task, rows)
    measured = measure(context, model.state, tokenized, with_loss=True)
    if model.task.labeled and measured.logits is None:  # judged by loss
        measured = replace(measured, logits=logits(context, model.state, tokenized))
    if predictions is not None:
        if measured.logits is None and measured.written is None:
            raise InputError(f"--predictions: silo {silo!r} is judged by {model.task.metric}, which writes no answers")
        write_predictions(Path(predictions), [(silo, measured, tokenized)])
    details = score_details(measured, tokenized, Bootstrap(resamples, config.seed, silo, "file"))
    return {"silo": silo, "file": str(path).removeprefix(MEMORY_PREFIX), "level": LEVEL, **(details or {})}


def _rows(
    model: PersonalModel,
    path: Path,
    records: Sequence[Record],
    own: SiloConfig | None,
    text: Sequence[str],
    label: str,
) -> list[Row]:
    """Make rows of the model's task."""
    task = model.task
    if task.kind == "generation":
        columns = tuple(text) or (own.columns if own else ())
        answer = label or (own.label if own else "")
        format = None if {*columns, answer} & records[0].keys() else find_format(records[0])
        return generation_rows(path, records, format) if format else instruction_rows(path, records, columns, answer)
    columns = text_columns(own, model.texts_per_row, records[0], text, "--text")
    label = label or (own.label if own else "label")
    separator = own.label_separator if own else None
    return target_rows(path, records, columns, label, task, by_index=own is None, separator=separator)
