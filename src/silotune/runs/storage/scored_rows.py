"""Write the test rows' scores: all metrics to `scores.json`, each row to `predictions.parquet`."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silotune.config import Config
from silotune.core.files import write_bytes, write_text
from silotune.data.scores import Classified
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.federation_scores import all_share_one_model
from silotune.evaluation.predict import Measured
from silotune.evaluation.score_details import LEVEL, Bootstrap, Interval, score_details
from silotune.models.heads.lm import prompt_rows
from silotune.training.federation import Federation

SCORES_FILE = "scores.json"

PREDICTIONS_FILE = "predictions.parquet"


def write_test_scores(folder: Path, federation: Federation, tested: Mapping[str, Measured]) -> dict[str, Any]:
    """Write both files into a run's or a silo's folder, predictions only if the configuration wants them.

    Returns:
        The content of `scores.json`: `level` (percent) and `resamples` of the intervals, the details
        (`evaluation/score_details.py`) of `silos`, or `global` where one model has one set of test rows, and `average`,
        the interval of the mean over silos where these share labeled rows.
    """
    config, test_rows = federation.config, test_rows_of(federation)
    one = federation.central is not None and all_share_one_model(federation)
    names = [name for name in tested if test_rows[name].judges][: 1 if one else None]
    details = {
        name: score_details(
            tested[name], test_rows[name], Bootstrap(config.evaluation.bootstrap, config.seed, "" if one else name)
        )
        for name in names
    }
    content = {
        "level": LEVEL,
        "resamples": config.evaluation.bootstrap,
        "silos": {} if one else details,
        "global": details[names[0]] if one and names else None,
    }
    average = None if one else _average_interval(config, [(tested[name], test_rows[name]) for name in names])
    content |= {"average": average} if average else {}
    text = json.dumps(content, indent=1)
    write_text(folder / SCORES_FILE, text + "\n")
    if config.evaluation.predictions:
        rows = [(None if one else name, tested[name], test_rows[name]) for name in names]
        with_predictions = [row for row in rows if row[1].logits is not None or row[1].written is not None]
        write_predictions(folder / PREDICTIONS_FILE, with_predictions, federation.context.backbone.tokenizer)
    return dict(json.loads(text))


def _average_interval(config: Config, judged: Sequence[tuple[Measured, TokenizedRows]]) -> Interval | None:
    """Return the interval of the mean over silos; None where they have rows of their own, or rows without labels."""
    silos = [
        Classified(measured.logits, rows.labels, rows.task.positive_index, rows.weights)
        for measured, rows in judged
        if measured.logits is not None and rows.task.rules.one_label
    ]
    if not silos or len(silos) < len(judged) or len({id(rows.ids) for _, rows in judged}) > 1:
        return None
    return Bootstrap(config.evaluation.bootstrap, config.seed, "average").of_average(silos, judged[0][1].task.metric)


def test_rows_of(federation: Federation) -> dict[str, TokenizedRows]:
    """Return reported silo → its test rows."""
    return {name: rows.test for silo in federation.silos.values() for name, rows in silo.evaluations.items()}


def write_predictions(path: Path, predicted: list[tuple[str | None, Measured, TokenizedRows]], tokenizer: Any) -> None:
    """Write one line per test row: silo, task, row (its place in the split), prompt, label, predicted, probabilities.

    For generation, `label` is the reference answer, `predicted` the written one, and `prompt` what the model read; for
    a regression they are numbers as text, and of several labels JSON lists. `probabilities` are in the order of the
    task's labels. `silo` is null where one model and one set of rows serve all. Where rows count differently, a further
    column has each one's `weight`; where it is known whose they are, one its `unit`. Nothing is written if no row has a
    prediction.
    """
    import pyarrow

    if not predicted:
        return
    schema = pyarrow.schema(
        {
            "silo": pyarrow.string(),
            "task": pyarrow.string(),
            "row": pyarrow.int32(),
            "prompt": pyarrow.string(),
            "label": pyarrow.string(),
            "predicted": pyarrow.string(),
            "probabilities": pyarrow.list_(pyarrow.float32()),
        }
    )
    for name, of_rows, kind in (("weight", "shares", pyarrow.float64()), ("unit", "units", pyarrow.string())):
        if any(getattr(rows, of_rows) is not None for _, _, rows in predicted):
            schema = schema.append(pyarrow.field(name, kind))
    _write_tables(path, [pyarrow.table(_columns(*one, tokenizer), schema) for one in predicted])


def read_test_scores(folder: Path) -> dict[str, Any] | None:
    """Return the content of `scores.json`; None if there is none (runs of older versions), or it is damaged."""
    try:
        content = json.loads((folder / SCORES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def collect_test_scores(folder: Path, silo_folders: Sequence[Path]) -> dict[str, Any]:
    """Write into a folder the details and predictions that silos wrote into their own, and return the details."""
    from pyarrow.parquet import ParquetFile

    contents = [content for path in silo_folders if (content := read_test_scores(path)) is not None]
    silos = {name: details for content in contents for name, details in content.get("silos", {}).items()}
    content = {"level": LEVEL, "resamples": contents[0]["resamples"] if contents else 0, "silos": silos, "global": None}
    write_text(folder / SCORES_FILE, json.dumps(content, indent=1) + "\n")
    predictions = [path / PREDICTIONS_FILE for path in silo_folders if (path / PREDICTIONS_FILE).is_file()]
    if predictions:
        _write_tables(folder / PREDICTIONS_FILE, [ParquetFile(path).read() for path in predictions])
    return content


def _write_tables(path: Path, tables: Sequence[Any]) -> None:
    """Write pyarrow's tables one after another as one Parquet file."""
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.concat_tables(tables), buffer)
    write_bytes(path, buffer.getvalue())


def _columns(silo: str | None, measured: Measured, rows: TokenizedRows, tokenizer: Any) -> dict[str, Any]:
    task, number = rows.task, rows.examples
    empty: list[Any] = [None] * number
    if measured.logits is not None:
        columns = task.rules.written(task, measured.logits, rows.labels)
    else:
        columns = {"label": list(rows.answers or []), "predicted": list(measured.written or [])}
        columns["prompt"] = tokenizer.batch_decode(prompt_rows(rows).ids)
    return {
        "silo": [silo] * number,
        "task": [task.name] * number,
        "row": list(range(number)),
        "prompt": empty,
        "probabilities": empty,
        "weight": empty if rows.weights is None else rows.weights.tolist(),
        "unit": rows.units or empty,
        **columns,
    }
