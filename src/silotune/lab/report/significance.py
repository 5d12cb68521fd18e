"""`paired_tests`: Wilcoxon tests of the best entry against others, by seed and silo; Holm's correction."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from silotune.data.metrics import lower_is_better, metric_title
from silotune.lab.report.entries import ReportEntry, group_by_data
from silotune.lab.report.scores import average_columns, mean_score, metric_name
from silotune.runs.scores import metric_of_column

NOTE = (
    "Two-sided Wilcoxon signed-rank test on the differences of test scores (zeros dropped), paired by seed and silo, "
    "or by seed alone where all silos are judged on the same rows; rows on other data are tested apart, against the "
    "best average there. p-values adjusted after Holm, all tests together. Pairs of one silo share its test rows, so "
    "they are not fully independent; with fewer than 6 that differ no p-value can fall below 0.05."
)


_CENTRAL = ":all"  # no silo can have this name


@dataclass(frozen=True)
class PairedTest:
    """Test of the best entry against another one.

    Args:
        best: label of the entry with the best average; with the metric where silos have unlike ones.
        other: label of the other entry.
        difference: mean difference in percentage points.
        pairs: number of pairs.
        differing: number of pairs with unlike scores, which alone count in the test.
        p: p-value, adjusted by Holm's method.
    """

    best: str
    other: str
    difference: float
    pairs: int
    differing: int
    p: float


def paired_tests(entries: Sequence[ReportEntry]) -> list[PairedTest]:
    """Test, on every data set, the entry with the best average against each other entry that shares pairs with it."""
    tests = [pair for group in group_by_data(entries) for pair in _against_the_best(group)]
    adjusted = holm([pair.p for pair in tests])
    return [replace(pair, p=p) for pair, p in zip(tests, adjusted, strict=True)]


def heading(entries: Sequence[ReportEntry]) -> str:
    """Describe what the tests compare."""
    return f"the best average{' of each data set' if len(group_by_data(entries)) > 1 else ''} against the others"


def _against_the_best(entries: Sequence[ReportEntry]) -> list[PairedTest]:
    """Test the entries of one data set, each metric for itself; p-values are not adjusted yet."""
    return [pair for column in average_columns(entries) for pair in _by_column(entries, column)]


def _by_column(entries: Sequence[ReportEntry], column: str) -> list[PairedTest]:
    """Test the entry with the best average of a column against the others, over the silos of that column's metric."""
    means = {entry.label: score.mean for entry in entries if (score := mean_score(entry, column))}
    scored = [entry for entry in entries if entry.label in means]
    if not scored:
        return []
    choose = min if lower_is_better(metric_name(scored[0], column)) else max
    best = choose(scored, key=lambda entry: means[entry.label])
    metric, tests = metric_of_column(column), []
    for other in entries:
        differences = _differences(best, other, metric) if other is not best else []
        if differences:
            label = f"{best.label} by {metric_title(metric)}" if metric else best.label
            mean = statistics.fmean(differences)
            rounded = [round(value, 9) for value in differences]  # so that ties and zeros are recognized
            differing = sum(value != 0 for value in rounded)
            tests.append(PairedTest(label, other.label, mean, len(rounded), differing, _wilcoxon(rounded)))
    return tests


def _differences(entry: ReportEntry, other: ReportEntry, metric: str) -> list[float]:
    scores, other_scores = _by_pair(entry, metric), _by_pair(other, metric)
    return [scores[key] - other_scores[key] for key in sorted(scores.keys() & other_scores.keys())]


def _by_pair(entry: ReportEntry, metric: str) -> dict[tuple[int, str], float]:
    """Map (seed, silo) to test score, of the silos with this metric if one is given.

    Silos tested on the same rows are no repetitions: they count as one.
    """
    central = {
        (run.seed, _CENTRAL): float(run.summary["average"])
        for run in entry.runs
        if run.shares_test_rows and run.summary["average"] is not None
    }
    return central | {
        (run.seed, name): float(silo["test"])
        for run in entry.runs
        if not run.shares_test_rows
        for name, silo in run.summary["silos"].items()
        if silo.get("test") is not None and metric in ("", silo.get("metric"))
    }


def _wilcoxon(differences: Sequence[float]) -> float:
    from scipy.stats import wilcoxon

    return float(wilcoxon(differences).pvalue) if any(differences) else 1.0


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's step-down method (1979).

    The k-th smallest of m p-values is multiplied by m − k + 1; the results are made monotone and at most 1.
    """
    adjusted, largest = list(values), 0.0
    for rank, position in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[position]))
        adjusted[position] = largest
    return adjusted
