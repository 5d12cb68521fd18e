"""`Curve`: series over rounds from events (validation, traffic, loss terms, errors), as means over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from silotune.core.numeric import mean_ignoring_none
from silotune.lab.report.entries import FinishedRun, ReportEntry
from silotune.lab.report.scores import standard_deviation
from silotune.runs.callbacks.base import logged_values

_SIMILARITY = "similarity_"

MIB = 2**20


@dataclass(frozen=True)
class Curve:
    """Mean over seeds at every x; `std` is None with a single run."""

    x: list[float]
    mean: list[float]
    std: list[float | None]


Series = dict[float, float]
"""From x, most often the round, to a number."""

SeriesReader = Callable[[FinishedRun], Series]
"""Reads one series from a run's event log."""


def curve(entry: ReportEntry, read: SeriesReader, ddof: int = 1) -> Curve | None:
    """Average the series of an entry's runs at the x values that all runs have.

    Args:
        entry: the runs, one per seed.
        read: reads one series from a run.
        ddof: the standard deviation over n seeds has the divisor n − ddof.

    Returns:
        The curve, or None if a run has no such series or the runs have no x in common.
    """
    series_of_runs = [points for run in entry.runs if (points := read(run))]
    if not series_of_runs:
        return None
    common = sorted(set.intersection(*(set(points) for points in series_of_runs)))
    values = [[points[x] for points in series_of_runs] for x in common]
    if not common:
        return None
    return Curve(common, [statistics.fmean(v) for v in values], [standard_deviation(v, ddof) for v in values])


def validation_of(silo: str) -> SeriesReader:
    """Return a reader of one silo's validation score (percent) by round."""

    def read(run: FinishedRun) -> Series:
        scores = {event["round"]: event.get("validation", {}).get(silo) for event in run.events_of("round")}
        return {number: float(value) for number, value in scores.items() if value is not None}

    return read


def mean_validation(run: FinishedRun) -> Series:
    """Read the mean validation score (percent) over silos, by round."""
    means: Series = {}
    for event in run.events_of("round"):
        mean = mean_ignoring_none(event.get("validation", {}).values())
        if mean is not None:
            means[event["round"]] = mean
    return means


def traffic(run: FinishedRun) -> Series:
    """Read the MiB sent and received by all silos up to each round; final phases count in the last round."""
    by_round: Series = {}
    for event in (*run.events_of("silo"), *run.events_of("final")):
        size = (event.get("bytes_up", 0) + event.get("bytes_down", 0)) / MIB
        by_round[event["round"]] = by_round.get(event["round"], 0.0) + size
    total, totals = 0.0, {}
    for number in sorted(by_round):
        total += by_round[number]
        totals[number] = total
    return totals


def product_error(run: FinishedRun) -> Series:
    """Read the error of averaging LoRA's A and B, a share of the mean product, by round."""
    return {event["round"]: float(event["product_error"]) for event in run.events_of("aggregation")}


def mean_product_error(entry: ReportEntry) -> float | None:
    """Return the mean of `product_error` over rounds and seeds; None without any."""
    errors = [error for run in entry.runs for error in product_error(run).values()]
    return statistics.fmean(errors) if errors else None


def loss_terms(entries: Sequence[ReportEntry]) -> list[str]:
    """Return the names of all logged loss terms, the total loss first."""
    names: dict[str, None] = {}
    for entry in entries:
        for event in entry.first.events_of("silo"):
            names |= {key: None for key in logged_values(event) if not key.startswith(_SIMILARITY)}
    return sorted(names, key=lambda name: (name != "loss", name))


def loss_term(name: str) -> SeriesReader:
    """Return a reader of a loss term by round, averaged over the round's silos."""

    def read(run: FinishedRun) -> Series:
        by_round: dict[float, list[float]] = {}
        for event in run.events_of("silo"):
            if isinstance(event.get(name), (int, float)):
                by_round.setdefault(event["round"], []).append(float(event[name]))
        return {number: statistics.fmean(values) for number, values in by_round.items()}

    return read


def values_by_silo(entry: ReportEntry, name: str) -> dict[str, Series]:
    """Return the series of one logged number per silo, by round (mean over seeds)."""
    values: dict[str, dict[float, list[float]]] = {}
    for run in entry.runs:
        for event in run.events_of("silo"):
            if isinstance(event.get(name), (int, float)):
                values.setdefault(event["silo"], {}).setdefault(event["round"], []).append(float(event[name]))
    return {silo: {number: statistics.fmean(v) for number, v in by_round.items()} for silo, by_round in values.items()}


def sent_by_silo(entry: ReportEntry) -> dict[str, float]:
    """Return per silo the MiB that it sent in a whole run (mean over seeds)."""
    totals: dict[str, float] = {}
    for run in entry.runs:
        for event in run.events_of("silo"):
            mib = event.get("bytes_up", 0) / MIB / len(entry.runs)
            totals[event["silo"]] = totals.get(event["silo"], 0.0) + mib
    return totals


def split_seconds(entry: ReportEntry) -> tuple[float, float]:
    """Return the seconds of training (in silos or at the coordinator) and the remaining seconds; means over seeds."""
    total = entry.mean_of("seconds")
    training = sum(
        event.get("seconds", 0.0)
        for run in entry.runs
        for kind in ("silo", "server", "final")
        for event in run.events_of(kind)
    ) / len(entry.runs)
    return min(training, total), max(total - training, 0.0)
