"""The tables of a report about single silos: rows and baselines, all metrics, F1 per label, confusion matrices."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silotune.core.numeric import score_text
from silotune.data.metrics import NUMBER_METRICS, metric_title
from silotune.evaluation.baselines import MEAN
from silotune.lab.report.entries import FinishedRun
from silotune.lab.report.frame import Results
from silotune.lab.report.tables import ResultTable, interval_text, plain_table
from silotune.runs.scores import TITLES, baseline_of, silo_metric
from silotune.runs.storage.scored_rows import read_test_scores

_MOST_ROWS = 40
"""Silos up to which a page has tables with a row for each."""

_MOST_CLASSES = 12
"""Labels up to which a page has a confusion matrix, and names them in the table of silos."""

_METRICS = ("accuracy", "micro_f1", "macro_f1", "balanced_accuracy", "mcc", "auroc", "ece", *NUMBER_METRICS[1:])
_WRITTEN = ("rouge1", "rougeL", "exact_match", "loss", "perplexity")


def rows_table(results: Results) -> ResultTable | None:
    """Make the table of the silos: metric, rows of the splits, labels, baselines. Numbers are of the first run."""
    if len(results.silos) > _MOST_ROWS:
        return None
    known = {name: run for run in reversed(results.runs) for name in run.summary["silos"]}
    found = {(name, key): baseline_of(known[name].summary, name, key) for name in results.silos for key in TITLES}
    baselines = [key for key in TITLES if key != MEAN or any(found[name, key] is not None for name in results.silos)]
    rows = []
    for name in results.silos:
        run = known[name]
        task = (run.summary.get("tasks") or {}).get(name, {})
        counts = run.summary["silos"][name].get("rows") or {}
        texts = [str(task.get("name", "–")), silo_metric(run.summary, name)]
        texts += [f"{counts[split]:,}" if split in counts else "–" for split in ("train", "validation", "test")]
        numbers = task.get("kind") == "regression"
        texts.append("numbers" if numbers else _classes(task.get("labels") or [], _details(run).get(name, {})))
        rows.append((name, [*texts, *(score_text(found[name, key]) for key in baselines)]))
    header = ["task", "metric", "train", "validation", "test", "classes (test rows)", *(TITLES[b] for b in baselines)]
    title = "rows of every silo, and its baselines (%), with the first seed"
    return plain_table(title, header, rows, "silo", results.silos)


def _classes(labels: Sequence[str], details: Mapping[str, Any]) -> str:
    """Name a task's labels with their test rows, if these are known; only their number if there are many."""
    if not labels or len(labels) > _MOST_CLASSES:
        return str(len(labels)) if labels else "–"
    counts = details.get("per_class") or {}
    return ", ".join(f"{label} ({counts[label]['rows']:,})" if label in counts else str(label) for label in labels)


def metrics_table(run: FinishedRun) -> ResultTable | None:
    """Make the table of all metrics per silo with the interval of its score; None without `scores.json`."""
    found = _details(run)
    if not found:
        return None
    names = [name for name in (*_METRICS, *_WRITTEN) if any(name in details["metrics"] for details in found.values())]
    rows = []
    for label, details in found.items():
        texts = [metric_title(details["metric"], details.get("positive", "")), score_text(details["score"])]
        texts.append(interval_text(details["intervals"].get(details["metric"])) or "–")
        rows.append((label, [*texts, *(score_text(details["metrics"].get(name)) for name in names)]))
    header = ["metric", "score", "95 % interval", *map(metric_title, names)]
    return plain_table(f"test rows in all metrics, seed {run.seed}", header, rows, "silo", list(found))


def classes_table(results: Results) -> ResultTable | None:
    """Make the table of F1 per silo, label and method, mean over seeds; None without labels."""
    import pandas

    found = [
        (f"{silo}: {label}", silo, entry.label, counts["rows"], counts["f1"])
        for entry in results.entries
        for run in entry.runs
        for silo, details in _details(run).items()
        for label, counts in (details.get("per_class") or {}).items()
    ]
    frame = pandas.DataFrame(found, columns=["row", "silo", "method", "rows", "f1"])
    rows = []
    for label, of_label in frame.groupby("row", sort=False):
        least, most = of_label["rows"].min(), of_label["rows"].max()
        by_method = of_label.groupby("method")["f1"].agg(statistics.fmean)
        scores = [score_text(by_method.get(entry.label)) for entry in results.entries]
        rows.append((str(label), [f"{least:,}" if least == most else f"{least:,} to {most:,}", *scores]))
    header = ["test rows", *(entry.label for entry in results.entries)]
    silos = list(frame.drop_duplicates("row")["silo"])
    return plain_table("F1 per label (%), mean over seeds", header, rows, "silo and label", silos) if rows else None


@dataclass(frozen=True)
class Confusion:
    """How one entry's first run answers a silo's test rows.

    Each true label has a row: per predicted label the number of test rows, and their share of that row.
    """

    silo: str
    entry: str
    labels: Sequence[str]
    rows: Sequence[Sequence[tuple[int, float]]]


def confusions(results: Results) -> list[Confusion]:
    """Return the confusion matrices of every entry's first run, silo by silo; none of tasks with many labels."""
    found = []
    details = [(entry.label, _details(entry.first)) for entry in results.entries]
    for silo in dict.fromkeys(name for _, of_entry in details for name in of_entry):
        for label, of_entry in details:
            matrix = of_entry.get(silo, {}).get("confusion")
            if matrix and len(matrix) <= _MOST_CLASSES:
                shares = [[(number, number / max(1, sum(row))) for number in row] for row in matrix]
                found.append(Confusion(silo, label, list(of_entry[silo]["per_class"]), shares))
    return found


def _details(run: FinishedRun) -> dict[str, Mapping[str, Any]]:
    """Return silo → details of `scores.json`, or those of all silos together; empty if there are none or too many."""
    content = read_test_scores(run.folder) or {}
    if content.get("global"):
        return {"all silos": content["global"]}
    silos: dict[str, Mapping[str, Any]] = content.get("silos") or {}
    return silos if len(silos) <= _MOST_ROWS else {}
