"""`rows_table` of silos; `metrics_table` and `classes_table`: a run's test rows in all metrics and per label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from silotune.data.metrics import metric_title
from silotune.evaluation.baselines import BAG_OF_WORDS, MAJORITY
from silotune.experiments.report.baseline_rows import TITLES, baseline_of
from silotune.experiments.report.entries import FinishedRun, ReportEntry, silo_names
from silotune.experiments.report.scores import silo_metric
from silotune.experiments.report.tables_by_method import ResultTable, TableCell
from silotune.runs.storage.scored_rows import read_test_scores

MOST_SILOS = 40
"""Silos up to which a page has these tables."""

_METRICS = ("accuracy", "macro_f1", "balanced_accuracy", "mcc", "auroc", "ece")
_WRITTEN = ("rouge1", "rougeL", "exact_match", "loss", "perplexity")


def rows_table(entries: Sequence[ReportEntry]) -> ResultTable | None:
    """Make the table of the silos: metric, rows of the splits, labels, baselines. Numbers are of the first run."""
    names = silo_names(entries)
    if len(names) > MOST_SILOS:
        return None
    rows = []
    for name in names:
        run = next(run for entry in entries for run in entry.runs if name in run.summary["silos"])
        task = (run.summary.get("tasks") or {}).get(name, {})
        counts = run.summary["silos"][name].get("rows") or {}
        texts = [str(task.get("name", "–")), silo_metric(run.summary, name)]
        texts += [f"{counts[split]:,}" if split in counts else "–" for split in ("train", "validation", "test")]
        texts.append(str(len(task.get("labels") or [])) or "–")
        texts += [_number(baseline_of(run.summary, name, key)) for key in (MAJORITY, BAG_OF_WORDS)]
        rows.append((name, [TableCell(text) for text in texts]))
    header = ["task", "metric", "train", "validation", "test", "labels", *TITLES.values()]
    return ResultTable("rows of every silo, and its baselines (%), with the first seed", header, rows, "silo")


def metrics_table(run: FinishedRun) -> ResultTable | None:
    """Make the table of all metrics per silo with the interval of its score; None without `scores.json`."""
    found = _details(run)
    if not found:
        return None
    names = [name for name in (*_METRICS, *_WRITTEN) if any(name in details["metrics"] for details in found.values())]
    rows = []
    for label, details in found.items():
        bounds = details["intervals"].get(details["metric"])
        texts = [metric_title(details["metric"], details.get("positive", "")), _number(details["score"])]
        texts.append("–" if bounds is None else f"{bounds[0]:.1f} to {bounds[1]:.1f}")
        texts += [_number(details["metrics"].get(name)) for name in names]
        rows.append((label, [TableCell(text) for text in texts]))
    header = ["metric", "score", "95 % interval", *map(metric_title, names)]
    return ResultTable(f"test rows in all metrics, seed {run.seed}", header, rows, "silo")


def classes_table(run: FinishedRun) -> ResultTable | None:
    """Make the table of precision, recall and F1 per silo and label; None without labels."""
    rows = [
        (f"{silo}: {label}", [TableCell(_number(of_class[key])) for key in ("precision", "recall", "f1")]
         + [TableCell(f"{of_class['rows']:,}")])
        for silo, details in _details(run).items()
        for label, of_class in (details.get("per_class") or {}).items()
    ]  # fmt: skip
    header = ["precision", "recall", "F1", "test rows"]
    return ResultTable(f"per label (%), seed {run.seed}", header, rows, "silo and label") if rows else None


def _details(run: FinishedRun) -> dict[str, Mapping[str, Any]]:
    """Return silo → details of `scores.json`, or those of all silos together; empty if there are none or too many."""
    content = read_test_scores(run.folder)
    if content is None:
        return {}
    if content.get("global"):
        return {"all silos": content["global"]}
    silos: dict[str, Mapping[str, Any]] = content.get("silos") or {}
    return silos if len(silos) <= MOST_SILOS else {}


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
