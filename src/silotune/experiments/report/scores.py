"""`Score`: an entry's test score or attack success over seeds; averages of a summary; the best entry by validation."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silotune.core.numeric import score_text
from silotune.data.metrics import lower_is_better, metric_title
from silotune.data.tasks import METRICS_OF
from silotune.errors import InputError
from silotune.experiments.report.entries import ReportEntry
from silotune.runs.summary import averages

ALL_METRICS = {metric for metrics in METRICS_OF.values() for metric in metrics}

AVERAGE = "average"
"""The column of the mean over silos. Where silos of a run have unlike metrics there is one for each: `average f1`."""


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


def score_of(summary: Mapping[str, Any], column: str) -> float | None:
    """Return a run's test score, for a silo or a column of averages (`average_columns`)."""
    if column == AVERAGE:
        value = summary["average"]
    elif metric := metric_of_column(column):
        value = averages(summary["silos"]).get(metric)
    else:
        value = summary["silos"].get(column, {}).get("test")
    return None if value is None else float(value)


def average_columns(entries: Sequence[ReportEntry]) -> list[str]:
    """Return the columns of averages: one, or one per metric if the silos of a run have unlike metrics."""
    by_run = [metrics_of(run.summary) for entry in entries for run in entry.runs]
    if all(len(metrics) <= 1 for metrics in by_run):
        return [AVERAGE]
    return [f"{AVERAGE} {metric}" for metric in dict.fromkeys(metric for metrics in by_run for metric in metrics)]


def metric_of_column(column: str) -> str:
    """Return the metric of a column of averages per metric; empty for all other columns."""
    first, _, metric = column.partition(" ")
    return metric if first == AVERAGE and metric in ALL_METRICS else ""


def metrics_of(summary: Mapping[str, Any]) -> list[str]:
    """Return the different metrics of a run's silos."""
    return list(dict.fromkeys(str(silo.get("metric", "")) for silo in summary["silos"].values()))


def silo_metric(summary: Mapping[str, Any], silo: str) -> str:
    """Return a silo's metric for display; F1 with the label that it is about."""
    task = (summary.get("tasks") or {}).get(silo, {})
    return metric_title(str(summary["silos"][silo].get("metric", "score")), str(task.get("positive", "")))


def average_text(summary: Mapping[str, Any]) -> str:
    """Return a run's mean test score for display; where silos have unlike metrics, that of each metric."""
    metrics = metrics_of(summary)
    if len(metrics) <= 1:
        return score_text(summary["average"])
    means = averages(summary["silos"])
    texts = {metric: score_text(mean) for metric, mean in means.items()}
    return ", ".join(f"{metric_title(metric)} {text}" for metric, text in texts.items())


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


def backbones_text(summaries: Iterable[Mapping[str, Any]]) -> str:
    """Name the backbones of runs: ids of the hub as they are, local folders by their last name."""
    names = dict.fromkeys(str(summary["backbone"]) for summary in summaries)
    shown = dict.fromkeys(Path(name).name if Path(name).is_absolute() else name for name in names)
    return f"backbone{'s' if len(shown) > 1 else ''} {', '.join(shown)}"


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
