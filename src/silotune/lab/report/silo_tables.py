"""`rows_table` of silos; tables of test rows in all metrics, per label and method, and `confusions`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silotune.core.numeric import score_text
from silotune.data.metrics import NUMBER_METRICS, metric_title
from silotune.evaluation.baselines import MEAN
from silotune.lab.report.entries import FinishedRun, ReportEntry, silo_names
from silotune.lab.report.tables_by_method import ResultTable, TableCell
from silotune.runs.scores import TITLES, baseline_of, silo_metric
from silotune.runs.storage.scored_rows import read_test_scores

MOST_SILOS = 40
"""Silos up to which a page has these tables."""

_MOST_CLASSES = 12
"""Labels up to which a page has a confusion matrix, and names them in the table of silos."""

_METRICS = ("accuracy", "micro_f1", "macro_f1", "balanced_accuracy", "mcc", "auroc", "ece", *NUMBER_METRICS[1:])
_WRITTEN = ("rouge1", "rougeL", "exact_match", "loss", "perplexity")


def rows_table(entries: Sequence[ReportEntry]) -> ResultTable | None:
    """Make the table of the silos: metric, rows of the splits, labels, baselines. Numbers are of the first run."""
    names = silo_names(entries)
    if len(names) > MOST_SILOS:
        return None
    rows: list[tuple[str, list[str], dict[str, float | None]]] = []
    found: set[str] = set()
    for name in names:
        run = next(run for entry in entries for run in entry.runs if name in run.summary["silos"])
        task = (run.summary.get("tasks") or {}).get(name, {})
        counts = run.summary["silos"][name].get("rows") or {}
        texts = [str(task.get("name", "–")), silo_metric(run.summary, name)]
        texts += [f"{counts[split]:,}" if split in counts else "–" for split in ("train", "validation", "test")]
        numbers = task.get("kind") == "regression"
        texts.append("numbers" if numbers else _classes(task.get("labels") or [], _details(run).get(name, {})))
        scores = [baseline_of(run.summary, name, key) for key in TITLES]
        found.update(key for key, score in zip(TITLES, scores, strict=True) if score is not None)
        rows.append((name, texts, dict(zip(TITLES, scores, strict=True))))
    baselines = [key for key in TITLES if key != MEAN or key in found]
    header = [
        "task",
        "metric",
        "train",
        "validation",
        "test",
        "classes (test rows)",
        *(TITLES[key] for key in baselines),
    ]
    cells = [
        (name, [*map(TableCell, texts), *(TableCell(score_text(of[key])) for key in baselines)])
        for name, texts, of in rows
    ]
    return ResultTable(
        "rows of every silo, and its baselines (%), with the first seed", header, cells, "silo", {}, names
    )


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
        bounds = details["intervals"].get(details["metric"])
        texts = [metric_title(details["metric"], details.get("positive", "")), score_text(details["score"])]
        texts.append("–" if bounds is None else f"{bounds[0]:.1f} to {bounds[1]:.1f}")
        texts += [score_text(details["metrics"].get(name)) for name in names]
        rows.append((label, [TableCell(text) for text in texts]))
    header = ["metric", "score", "95 % interval", *map(metric_title, names)]
    return ResultTable(f"test rows in all metrics, seed {run.seed}", header, rows, "silo", {}, list(found))


def classes_table(entries: Sequence[ReportEntry]) -> ResultTable | None:
    """Make the table of F1 per silo, label and method, mean over seeds; None without labels."""
    found = [[(run, _details(run)) for run in entry.runs] for entry in entries]
    keys = dict.fromkeys(
        (silo, label)
        for of_entry in found
        for _, details in of_entry
        for silo, of_silo in details.items()
        for label in of_silo.get("per_class") or {}
    )
    if not keys:
        return None
    rows = []
    for silo, label in keys:
        per_entry = [
            [of[silo]["per_class"][label] for _, of in of_entry if label in (of.get(silo, {}).get("per_class") or {})]
            for of_entry in found
        ]
        counts = sorted({of_class["rows"] for of_entry in per_entry for of_class in of_entry})
        number = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        scores = [score_text(statistics.fmean(c["f1"] for c in classes) if classes else None) for classes in per_entry]
        rows.append((f"{silo}: {label}", [TableCell(number), *map(TableCell, scores)]))
    title = "F1 per label (%), mean over seeds"
    header = ["test rows", *(entry.label for entry in entries)]
    return ResultTable(title, header, rows, "silo and label", {}, [silo for silo, _ in keys])


@dataclass(frozen=True)
class Confusion:
    """How one entry's first run answers a silo's test rows.

    Args:
        silo: the silo.
        entry: the entry's label.
        labels: label names.
        rows: for each true label, pairs of (number of test rows, share of that label's rows) per predicted label.
    """

    silo: str
    entry: str
    labels: Sequence[str]
    rows: Sequence[Sequence[tuple[int, float]]]


def confusions(entries: Sequence[ReportEntry]) -> list[Confusion]:
    """Return the confusion matrices of every entry's first run, silo by silo; none of tasks with many labels."""
    found = []
    details = [(entry.label, _details(entry.first)) for entry in entries]
    for silo in dict.fromkeys(name for _, of_entry in details for name in of_entry):
        for label, of_entry in details:
            matrix = of_entry.get(silo, {}).get("confusion")
            if not matrix or len(matrix) > _MOST_CLASSES:
                continue
            names = list(of_entry[silo]["per_class"])
            shares = [[(number, number / max(1, sum(row))) for number in row] for row in matrix]
            found.append(Confusion(silo, label, names, shares))
    return found


def _details(run: FinishedRun) -> dict[str, Mapping[str, Any]]:
    """Return silo → details of `scores.json`, or those of all silos together; empty if there are none or too many."""
    content = read_test_scores(run.folder)
    if content is None:
        return {}
    if content.get("global"):
        return {"all silos": content["global"]}
    silos: dict[str, Mapping[str, Any]] = content.get("silos") or {}
    return silos if len(silos) <= MOST_SILOS else {}
