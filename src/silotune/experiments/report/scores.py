"""`Score`: an entry's test score or attack success rate: mean and standard deviation over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from silotune.experiments.report.entries import ReportEntry

AVERAGE = "average"


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
    """Return the test score of every run that has one, for a silo or the average."""
    if silo == AVERAGE:
        scores = [run.summary["average"] for run in entry.runs]
    else:
        scores = [run.summary["silos"].get(silo, {}).get("test") for run in entry.runs]
    return [float(value) for value in scores if value is not None]


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
    """Return a silo's metric; for the average the common one, or `mixed`."""
    silos = entry.first.summary["silos"]
    if silo != AVERAGE:
        return str(silos.get(silo, {}).get("metric", ""))
    central = entry.first.summary.get("global") or {}
    names = {str(silo_summary["metric"]) for silo_summary in silos.values()} or {str(central.get("metric", ""))}
    return names.pop() if len(names) == 1 else "mixed"
