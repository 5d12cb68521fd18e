"""Alarms of a report: what makes the scores of its entries say less than they seem to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from silotune.lab.report.entries import FinishedRun, ReportEntry
from silotune.lab.report.frame import Results
from silotune.runs.storage.scored_rows import read_test_scores

_CONSTANT = 95.0
"""Percent of rows with one answer from which a model is as good as constant."""

_LEVEL = 0.05
"""Chance of an alarm about an entry whose validation and test rows are of one kind."""

_NAMED = 4


def alarms(results: Results) -> list[str]:
    """Return a sentence for everything that is wrong with the runs' answers, scores and budgets."""
    rounds = {entry.label: {run.summary.get("rounds") for run in entry.runs} for entry in results.entries}
    lines = [line for entry in results.entries for line in (*_constant(entry), *_disagreeing(entry))]
    if len({frozenset(numbers) for numbers in rounds.values()}) > 1:
        numbers = (f"{label} {', '.join(map(str, sorted(map(str, of))))}" for label, of in rounds.items())
        lines.append(f"Unequal numbers of rounds: {'; '.join(numbers)}")
    return [*lines, *results.plan.remarks]


def _constant(entry: ReportEntry) -> Iterator[str]:
    """Name the silos whose model gives nearly all test rows one answer."""
    remarks: dict[str, str] = {}
    for run in entry.runs:
        scores = read_test_scores(run.folder) or {}
        for silo, details in {**scores.get("silos", {}), "all silos": scores.get("global") or {}}.items():
            answer, percent = details.get("commonest") or ("", 0)
            if percent >= _CONSTANT:
                balanced = details["metrics"].get("balanced_accuracy")
                tail = "" if balanced is None else f", balanced accuracy {balanced:.1f}"
                remarks.setdefault(silo, f"{silo} ({answer!r} to {percent:.0f} % of rows{tail})")
    if remarks:
        yield f"{entry.label}: one answer to nearly all rows: {_some(list(remarks.values()))}"


def _disagreeing(entry: ReportEntry) -> Iterator[str]:
    """Name the silos whose validation and test accuracy differ by more than chance, all silos and seeds together."""
    from scipy.stats import norm

    pairs = [pair for run in entry.runs for pair in _accuracies(run)]
    most = float(norm.ppf(1 - _LEVEL / (2 * max(1, len(pairs)))))
    apart = []
    for silo, (validation, test), (validated, tested) in pairs:
        right = min(1.0, max(0.0, (validation * validated + test * tested) / (100 * (validated + tested))))
        deviation = 100 * math.sqrt(right * (1 - right) * (1 / validated + 1 / tested))
        if abs(validation - test) > most * deviation:
            apart.append(f"{silo} ({validation:.1f} and {test:.1f})")
    if apart:
        yield f"{entry.label}: validation and test differ by more than chance: {_some(apart)}"


def _accuracies(run: FinishedRun) -> Iterator[tuple[str, Any, Any]]:
    """Yield silo, validation and test accuracy, and the rows of both, where single rows are counted alike."""
    if (run.config.get("partition") or {}).get("evaluation") == "own":
        return
    for name, silo in run.summary["silos"].items():
        scores, rows = (silo.get("validation"), silo.get("test")), silo.get("rows") or {}
        counts = (rows.get("validation"), rows.get("test"))
        if silo.get("metric") == "accuracy" and "validation_metric" not in silo and None not in scores and all(counts):
            yield name, scores, counts


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
