"""`score_interval`: the 95 % interval of an entry's score; `clear_winners`: whose interval is apart from all others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from silotune.data.metrics import lower_is_better, metric_range
from silotune.lab.report.entries import ReportEntry
from silotune.lab.report.scores import metric_name, scores_over_seeds
from silotune.runs.scores import AVERAGE, metric_of_column

Interval = tuple[float, float]

NOTE = (
    "Small numbers are 95 % intervals: by bootstrap over the test rows (of an average: from its silos' half-widths, as "
    "if independent), and with several seeds by Student's t over seeds, which is very wide with two, if that is wider. "
    "The best score is bold, the second underlined. A best score is green with a check mark only if its interval lies "
    "apart from those of all others on the same data; where none is, no winner is shown."
)


def score_interval(entry: ReportEntry, column: str) -> Interval | None:
    """Return the 95 % interval of a score: over test rows, or over several seeds if that is wider.

    Args:
        entry: the runs.
        column: a silo or a column of averages.

    Returns:
        The bounds, within those of the metric; None if the score or its interval is unknown.
    """
    scores = scores_over_seeds(entry, column)
    over_rows = [found for run in entry.runs if (found := _over_rows(run.summary, column)) is not None]
    candidates = []
    if len(scores) > 1:
        candidates.append(_over_seeds(scores))
    if scores and len(over_rows) >= len(scores):
        low, high = zip(*over_rows, strict=True)
        candidates.append((statistics.fmean(low), statistics.fmean(high)))
    if not candidates:
        return None
    widest = max(candidates, key=lambda bounds: bounds[1] - bounds[0])
    lowest, highest = metric_range(metric_name(entry, column))
    return max(lowest, widest[0]), min(highest, widest[1])


def interval_text(interval: Interval | None) -> str:
    """Return the bounds for display; empty without an interval."""
    return "" if interval is None else f"{interval[0]:.1f} to {interval[1]:.1f}"


def clear_winners(entries: Sequence[ReportEntry], column: str) -> list[bool]:
    """Say for each entry whether its score is the best of its data and its interval apart from those of all others."""
    intervals = [score_interval(entry, column) for entry in entries]
    lower = lower_is_better(metric_name(entries[0], column)) if entries else False
    winners = []
    for entry, interval in zip(entries, intervals, strict=True):
        others = [
            other_interval
            for other, other_interval in zip(entries, intervals, strict=True)
            if other is not entry
            and other.evaluated_on == entry.evaluated_on
            and (other_interval is not None or scores_over_seeds(other, column))
        ]
        winners.append(bool(others) and all(_apart(interval, other, lower) for other in others))
    return winners


def _apart(best: Interval | None, other: Interval | None, lower: bool) -> bool:
    if best is None or other is None:
        return False
    return best[1] < other[0] if lower else best[0] > other[1]


def _over_seeds(scores: Sequence[float]) -> Interval:
    from scipy.stats import t

    mean, number = statistics.fmean(scores), len(scores)
    half = float(t.ppf(0.975, number - 1)) * statistics.stdev(scores) / math.sqrt(number)
    return mean - half, mean + half


def _over_rows(summary: Mapping[str, Any], column: str) -> Interval | None:
    """Return the bootstrap interval that the run has for a silo or for all silos, or make that of an average."""
    known: Mapping[str, Any] = summary.get("intervals") or {}
    by_silo: Mapping[str, Any] = known.get("silos") or {}
    metric = metric_of_column(column)
    if column != AVERAGE and not metric:
        found = by_silo.get(column)
        return None if found is None else (float(found[0]), float(found[1]))
    if known.get("global"):
        return float(known["global"][0]), float(known["global"][1])
    silos = [
        name
        for name, silo in summary["silos"].items()
        if silo.get("test") is not None and metric in ("", silo.get("metric"))
    ]
    if not silos or any(by_silo.get(name) is None for name in silos):
        return None
    halves = [(by_silo[name][1] - by_silo[name][0]) / 2 for name in silos]
    half = math.sqrt(math.fsum(value**2 for value in halves)) / len(halves)
    mean = math.fsum(float(summary["silos"][name]["test"]) for name in silos) / len(silos)
    return mean - half, mean + half
