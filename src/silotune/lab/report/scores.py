"""`Score`: an entry's test score or attack success over seeds; the best entry by validation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silotune.data.metrics import lower_is_better
from silotune.errors import InputError
from silotune.lab.report.entries import ReportEntry
from silotune.runs.scores import AVERAGE, metric_of_column, metrics_of, score_of


@dataclass(frozen=True)
class Score:
    """A test score (percent) over seeds.

    Args:
        mean: mean over seeds.
        std: standard deviation; None with too few seeds.
        n: number of seeds.
    """

    mean: float
    std: float | None
    n: int

    @property
    def text(self) -> str:
        """The score for display."""
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def standard_deviation(values: Sequence[float], ddof: int) -> float | None:
    """Return the standard deviation with divisor n − ddof; None if the divisor is not positive."""
    if len(values) <= ddof:
        return None
    return statistics.pstdev(values) if ddof == 0 else statistics.stdev(values)


def over_seeds(values: Sequence[float], ddof: int) -> Score | None:
    """Return mean and standard deviation of values, one per seed; None without values."""
    return Score(statistics.fmean(values), standard_deviation(values, ddof), len(values)) if values else None


def scores_over_seeds(entry: ReportEntry, silo: str) -> list[float]:
    """Return the test score of every run that has one, for a silo or a column of averages."""
    scores = [score_of(run.summary, silo) for run in entry.runs]
    return [value for value in scores if value is not None]


def average_columns(entries: Sequence[ReportEntry]) -> list[str]:
    """Return the columns of averages: one, or one per metric if the silos of a run have unlike metrics."""
    by_run = [metrics_of(run.summary) for entry in entries for run in entry.runs]
    if all(len(metrics) <= 1 for metrics in by_run):
        return [AVERAGE]
    return [f"{AVERAGE} {metric}" for metric in dict.fromkeys(metric for metrics in by_run for metric in metrics)]


def mean_score(entry: ReportEntry, silo: str, ddof: int = 1) -> Score | None:
    """Return mean and standard deviation of a silo's test score over seeds; None without scores."""
    return over_seeds(scores_over_seeds(entry, silo), ddof)


def any_attacked(entries: Sequence[ReportEntry]) -> bool:
    """Whether any run measured a backdoor attack."""
    return any(run.summary.get("attack") for entry in entries for run in entry.runs)


def success_rate(entry: ReportEntry, silo: str = AVERAGE, ddof: int = 1) -> Score | None:
    """Return the attack's success rate (percent) over seeds, for a silo or the average; None if not measured."""
    results = [run.summary.get("attack") if silo == AVERAGE else run.summary["silos"].get(silo) for run in entry.runs]
    values = [float(result["asr"]) for result in results if result and result.get("asr") is not None]
    return over_seeds(values, ddof)


def metric_name(entry: ReportEntry, silo: str) -> str:
    """Return the metric of a silo or a column of averages; `mixed` if silos have unlike ones."""
    silos = entry.first.summary["silos"]
    if metric_of_column(silo):
        return metric_of_column(silo)
    if silo != AVERAGE:
        return str(silos.get(silo, {}).get("metric", ""))
    central = entry.first.summary.get("global") or {}
    names = {str(silo_summary["metric"]) for silo_summary in silos.values()} or {str(central.get("metric", ""))}
    return names.pop() if len(names) == 1 else "mixed"


def best_by_validation(entries: Sequence[ReportEntry]) -> ReportEntry:
    """Return the entry with the best mean validation score over silos and seeds; the first of equals.

    Where silos were judged by a loss, or a metric that is better if lower, the lowest mean is the best.
    """
    judged = {
        (entry.evaluated_on, tuple(_judged_by(silo) for silo in run.summary["silos"].values()))
        for entry in entries
        for run in entry.runs
    }
    if len(judged) != 1:
        raise InputError("best: the entries differ in their data or metrics; allowed: a comparison of one data set")
    means = [_validation(entry) for entry in entries]
    ((_, metrics),) = judged
    return entries[means.index(min(means) if any(map(lower_is_better, metrics)) else max(means))]


def _judged_by(silo: Mapping[str, Any]) -> str:
    """Return the metric of a silo's validation score."""
    return str(silo.get("validation_metric", silo["metric"]))


def _validation(entry: ReportEntry) -> float:
    """Return an entry's validation score, its mean over seeds and silos; silos without validation rows are left out."""
    scores = []
    for run in entry.runs:
        of_silos = [silo["validation"] for silo in run.summary["silos"].values() if silo["validation"] is not None]
        if not of_silos:
            raise InputError(f"best: {run.folder} has no validation score; allowed: runs with validation rows")
        scores.append(statistics.fmean(of_silos))
    return statistics.fmean(scores)
