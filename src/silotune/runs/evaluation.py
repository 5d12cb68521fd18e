"""Score one silo's model on labeled rows (`silotune evaluate`, `evaluate` in Python), and read files of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from silotune.config.tables import MEMORY_PREFIX, Table, table_rows
from silotune.core.notebook import html_table
from silotune.core.numeric import score_text
from silotune.data.generation_rows import find_format, generation_rows, instruction_rows
from silotune.data.kinds.retrieval import distinct, sequences_of
from silotune.data.loading import load_absent, load_silos
from silotune.data.readers import Record, read_records, read_text, require_columns, stream_records
from silotune.data.rows import Row
from silotune.data.targets import target_rows
from silotune.data.tasks import metric_title
from silotune.errors import InputError
from silotune.evaluation.predict import logits, measure
from silotune.evaluation.score_details import LEVEL, Bootstrap, score_details
from silotune.runs.build.resolve import read_config
from silotune.runs.personal_model import PersonalModel, load_model
from silotune.runs.run_result import Run
from silotune.runs.storage.scored_rows import write_predictions

if TYPE_CHECKING:
    import pandas

_TABLE = "rows"
"""What stands for the file's name where a table was given; a file's name has an ending."""


def evaluate(
    run: str | Path | Run,
    silo: str,
    rows: str | Path | Table,
    *,
    text: str | Sequence[str] = (),
    label: str = "",
    predictions: str | Path | None = None,
    resamples: int = 1000,
) -> Evaluation:
    """Score one silo's model of a finished run on labeled rows.

    Args:
        run: the run or its folder.
        silo: the silo's name.
        rows: a CSV, TSV, JSON lines or Parquet file, or a table: a DataFrame, a `datasets.Dataset`, dictionaries.
        text: the text column, or the two of a pair; by default those of the silo's own data.
        label: the label column, or that of the answers; by default that of the silo's own data.
        predictions: a file for the prediction of every row, as `predictions.parquet` of a run.
        resamples: how often rows are resampled for intervals; 0: no intervals.
    """
    folder = run.folder if isinstance(run, Run) else Path(run)
    model = load_model(folder, silo)
    path = Path(rows) if isinstance(rows, (str, Path)) else Path(MEMORY_PREFIX + _TABLE)
    records = read_records(path, *_reading(model)) if isinstance(rows, (str, Path)) else table_rows(rows, _TABLE)
    context, columns = model.context, [text] if isinstance(text, str) else list(text)
    tokenize = context.head.row_tokenizer(context.backbone, context.max_length)
    tokenized = tokenize(
        model.task, labeled_rows(model, path, records, [column for column in columns if column], label)
    )
    measured = measure(context, model.state, tokenized, with_loss=True)
    if model.task.labeled and measured.logits is None:  # judged by loss
        measured = replace(measured, logits=logits(context, model.state, tokenized))
    if predictions is not None:
        if measured.logits is None and measured.written is None:
            raise InputError(f"--predictions: silo {silo!r} is judged by {model.task.metric}, which writes no answers")
        write_predictions(Path(predictions), [(silo, measured, tokenized)], context.backbone.tokenizer)
    details = score_details(measured, tokenized, Bootstrap(resamples, int(model.about["seed"]), silo, "file"))
    file = str(path).removeprefix(MEMORY_PREFIX)
    return Evaluation({"silo": silo, "file": file, "level": LEVEL, **(details or {})})


class Evaluation(dict[str, Any]):
    """All metrics of a model's predictions on labeled rows, as a mapping.

    It has `silo`, `file`, `level` of the intervals in percent, `metric`, `score`, `rows`, `metrics` (name → score) and
    `intervals` (name → two bounds); of rows with labels also `per_class`, `confusion` and `calibration`.
    """

    @property
    def score(self) -> float | None:
        """The score by the task's own metric."""
        score: float | None = self["score"]
        return score

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for every metric: score, lower and upper bound of its interval."""
        import pandas

        bounds = self["intervals"]
        rows = {name: [value, *(bounds.get(name) or (None, None))] for name, value in self["metrics"].items()}
        return pandas.DataFrame.from_dict(rows, orient="index", columns=["score", "low", "high"])

    @property
    def title(self) -> str:
        """Describe the scored rows in words."""
        source = "a table" if self["file"] == _TABLE else self["file"]
        return f"{self['rows']:,} rows of {source}, silo {self['silo']}"

    def metric_rows(self) -> list[list[str]]:
        """Return a row of texts for every metric: its name, its score and the interval."""
        rows = []
        for name, value in self["metrics"].items():
            bounds = self["intervals"].get(name)
            interval = "–" if bounds is None else f"{bounds[0]:.2f} to {bounds[1]:.2f}"
            title = metric_title(name, self.get("positive", ""))
            rows.append([title, score_text(value), interval])
        return rows

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {score}" for name, score, _ in self.metric_rows())
        return f"Evaluation: {self.title}\n{scores}"

    def _repr_html_(self) -> str:
        return html_table(self.title, ["metric", "score", f"{self['level']} % interval"], self.metric_rows())


def _reading(model: PersonalModel) -> tuple[str, str | None]:
    """Return the encoding of the silo's own files, and what is between their columns."""
    own = model.about["columns"] or {}
    return str(own.get("encoding", "utf-8")), own.get("column_separator")


def table_texts(
    model: PersonalModel, path: Path, choice: Sequence[str], opened: BinaryIO | None = None
) -> Iterator[str | tuple[str, str]]:
    """Yield the texts of a CSV, TSV or Parquet file, a text or a pair a row; other columns are not read.

    The columns are the chosen ones, or those of the silo's own data.
    """
    if not model.task.labeled:
        raise InputError(f"--file {path}: a task of generation reads lines of text, or JSON lines (.jsonl), no table")
    columns: tuple[str, ...] = ()
    for number, record in enumerate(stream_records(path, *_reading(model), opened), 1):
        if not columns:
            columns = _text_columns(model, record, choice, "--columns")
            require_columns(path, record, columns)
        texts = [read_text(path, number, record, column) for column in columns]
        yield texts[0] if len(texts) == 1 else (texts[0], texts[1])


def labeled_rows(
    model: PersonalModel, path: Path, records: Sequence[Record], text: Sequence[str], label: str
) -> list[Row]:
    """Make rows of the model's task from a table's records; the silo's own columns replace those not given."""
    task, own = model.task, model.about["columns"]
    if not task.labeled:
        columns = tuple(text) or tuple(own["text"] if own else ())
        answer = label or (own["label"] if own else "")
        format = None if {*columns, answer} & records[0].keys() else find_format(records[0])
        return generation_rows(path, records, format) if format else instruction_rows(path, records, columns, answer)
    columns = _text_columns(model, records[0], text, "--text")
    label = label or (own["label"] if own else "label")
    separator = own["separator"] if own else None
    return target_rows(path, records, columns, label, task, by_index=own is None, separator=separator)


def own_passages(run: Path, silo: str) -> list[str]:
    """Return the passages of a silo's rows, whose files are on this machine, each once."""
    config = read_config(str(run / "config.yaml"))
    data = next((data for data in (*load_silos(config), *load_absent(config)) if data.name == silo), None)
    if data is None:
        raise InputError(f"--query: the rows of silo {silo!r} are not here; give the passages as --file")
    rows = data.splits.all()
    return distinct([each for row in rows for each in sequences_of(row)])


def _text_columns(model: PersonalModel, record: Record, choice: Sequence[str], option: str) -> tuple[str, ...]:
    """Return the columns of a row's texts: the user's, the silo's own, or the usual ones; `option` is for messages."""
    own, number = model.about["columns"], model.texts_per_row
    usual = ("text",) if number == 1 and "text" in record else ("sentence1", "sentence2")[:number]
    columns = tuple(choice) or tuple(own["text"] if own else usual)
    if len(columns) != number:
        raise InputError(
            f"{option}: {len(columns)} columns, but a row of this silo's task has {number} "
            f"{'text' if number == 1 else 'texts'}"
        )
    return columns
