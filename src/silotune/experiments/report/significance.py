"""Whether a difference between two methods is more than chance: paired over seeds and silos."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from silotune.experiments.report.entries import ReportEntry, group_by_data

NOTE = (
    "Two-sided Wilcoxon signed-rank test on the differences of test scores (zeros dropped), paired by seed and silo, "
    "or by seed alone where all silos are judged on the same rows; rows on other data are tested apart, against the "
    "best average there. p-values adjusted after Holm, all tests together. Pairs of one silo share its test rows, so "
    "they are not fully independent; with fewer than 6 pairs no p-value can fall below 0.05."
)


_CENTRAL = ":all"  # no silo can have this name


@dataclass(frozen=True)
class PairedTest:
    """`best` against `other`: mean difference in percentage points over `pairs` pairs, and the adjusted p-value."""

    best: str
    other: str
    difference: float
    pairs: int
    p: float


def paired_tests(entries: Sequence[ReportEntry]) -> list[PairedTest]:
    """On every data set the row with the best average against each other one with which it has pairs."""
    found = [pair for group in group_by_data(entries) for pair in _against_the_best(group)]
    adjusted = holm([pair.p for pair in found])
    return [replace(pair, p=p) for pair, p in zip(found, adjusted, strict=True)]


def heading(entries: Sequence[ReportEntry]) -> str:
    """What the tests are of."""
    return f"the best average{' of each data set' if len(group_by_data(entries)) > 1 else ''} against the others"


def _against_the_best(entries: Sequence[ReportEntry]) -> list[PairedTest]:
    """Rows on one data set, p-values as they are."""
    scored = [entry for entry in entries if not math.isnan(entry.mean_of("average"))]
    if not scored:
        return []
    best = max(scored, key=lambda entry: entry.mean_of("average"))
    found = []
    for other in entries:
        differences = _differences(best, other) if other is not best else []
        if differences:
            mean = statistics.fmean(differences)
            found.append(PairedTest(best.label, other.label, mean, len(differences), _wilcoxon(differences)))
    return found


def _differences(one: ReportEntry, other: ReportEntry) -> list[float]:
    mine, theirs = _by_pair(one), _by_pair(other)
    return [mine[key] - theirs[key] for key in sorted(mine.keys() & theirs.keys())]


def _by_pair(entry: ReportEntry) -> dict[tuple[int, str], float]:
    """(seed, silo) → test score. Silos that are judged on the same rows are no repetitions of one another."""
    central = {
        (run.seed, _CENTRAL): float(run.summary["average"])
        for run in entry.runs
        if run.central and run.summary["average"] is not None
    }
    return central | {
        (run.seed, name): float(silo["test"])
        for run in entry.runs
        if not run.central
        for name, silo in run.summary["silos"].items()
        if silo.get("test") is not None
    }


def _wilcoxon(differences: Sequence[float]) -> float:
    from scipy.stats import wilcoxon

    rounded = [round(value, 9) for value in differences]  # equal up to rounding is equal: ties and zeros are found
    return float(wilcoxon(rounded).pvalue) if any(rounded) else 1.0


def holm(values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (1979): the k-th smallest of m times m − k + 1, never decreasing, at most 1."""
    adjusted, largest = list(values), 0.0
    for rank, position in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[position]))
        adjusted[position] = largest
    return adjusted
