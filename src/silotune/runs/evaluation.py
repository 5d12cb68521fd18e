"""Score one silo's model on labeled rows (`silotune evaluate`, `evaluate` in Python)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silotune.config.tables import MEMORY_PREFIX, Table, table_rows
from silotune.core.notebook import html_table
from silotune.core.numeric import score_text
from silotune.data.metrics import metric_title
from silotune.errors import InputError
from silotune.evaluation.bootstrap import LEVEL, Bootstrap
from silotune.evaluation.predict import logits, measure
from silotune.evaluation.score_details import score_details
from silotune.runs.file_rows import labeled_rows, model_records
from silotune.runs.load import load_model
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
        resamples: of the rows, for intervals; 0 makes none.
    """
    folder = run.folder if isinstance(run, Run) else Path(run)
    model = load_model(folder, silo)
    path = Path(rows) if isinstance(rows, (str, Path)) else Path(MEMORY_PREFIX + _TABLE)
    records = model_records(model, path) if isinstance(rows, (str, Path)) else table_rows(rows, _TABLE)
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
        write_predictions(Path(predictions), [(silo, measured, tokenized)])
    details = score_details(measured, tokenized, Bootstrap(resamples, int(model.about["seed"]), silo, "file"))
    file = str(path).removeprefix(MEMORY_PREFIX)
    return Evaluation({"silo": silo, "file": file, "level": LEVEL, **(details or {})})


class Evaluation(Mapping[str, Any]):
    """All metrics of a model's predictions on labeled rows, as a mapping.

    It has `silo`, `file`, `level` of the intervals in percent, `metric`, `score`, `rows`, `metrics` (name → score) and
    `intervals` (name → two bounds); of rows with labels also `per_class`, `confusion` and `calibration`.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

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
        """Return the table that a notebook shows."""
        return html_table(self.title, ["metric", "score", f"{self['level']} % interval"], self.metric_rows())
