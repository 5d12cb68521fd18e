"""Which entry of a report is best, and how sure that is: by validation, by paired tests, against a bag of words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from silotune.data.tasks import lower_is_better, metric_title
from silotune.errors import InputError
from silotune.evaluation.baselines import BAG_OF_WORDS
from silotune.lab.report.entries import ReportEntry
from silotune.lab.report.frame import Results
from silotune.runs.scores import AVERAGE, TITLES, metric_of_column

NOTE = (
    "Two-sided Wilcoxon signed-rank test on the differences of test scores (zeros dropped), paired by seed and silo, "
    "or by seed alone where all silos are judged on the same rows; rows on other data are tested apart, against the "
    "best average there. p-values adjusted after Holm, all tests together. Pairs of one silo share its test rows, so "
    "they are not fully independent; with fewer than 6 that differ no p-value can fall below 0.05."
)


_CENTRAL = ":all"  # no silo can have this name

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

_MOST_NAMED = 6
"""Silos and averages that a sentence names."""


@dataclass(frozen=True)
class PairedTest:
    """Test of the entry with the best average (of a metric, where silos have unlike ones) against another one.

    The mean difference is in percentage points; of all pairs, the differing ones alone count; p is adjusted after Holm.
    """

    best: str
    other: str
    difference: float
    pairs: int
    differing: int
    p: float

    @property
    def numbers(self) -> list[str]:
        """Difference, pairs, differing pairs and p-value for display."""
        return [f"{self.difference:+.2f}", str(self.pairs), str(self.differing), f"{self.p:.3g}"]


def paired_tests(results: Results) -> list[PairedTest]:
    """Test, on every data set, the entry with the best average against each other entry that shares pairs with it."""
    tests = [pair for part in results.parts for column in part.averages for pair in _of_column(part, column)]
    adjusted = holm([pair.p for pair in tests])
    return [replace(pair, p=p) for pair, p in zip(tests, adjusted, strict=True)]


def _of_column(results: Results, column: str) -> list[PairedTest]:
    """Test the entry with the best average of a column against the others, over the silos of that column's metric."""
    scored = [(entry, score.mean) for entry in results.entries if (score := results.score(entry.label, column))]
    if not scored:
        return []
    choose = min if results.lower(column) else max
    best, _ = choose(scored, key=lambda pair: pair[1])
    metric, tests = metric_of_column(column), []
    from scipy.stats import wilcoxon

    label = f"{best.label} by {metric_title(metric)}" if metric else best.label
    of_best = _by_pair(best, metric)
    for other in results.entries:
        of_other = _by_pair(other, metric) if other is not best else {}
        if shared := sorted(of_best.keys() & of_other.keys()):
            differences = [of_best[key] - of_other[key] for key in shared]
            rounded = [round(value, 9) for value in differences]  # so that ties and zeros are recognized
            mean, differing = statistics.fmean(differences), sum(value != 0 for value in rounded)
            p = float(wilcoxon(rounded).pvalue) if differing else 1.0
            tests.append(PairedTest(label, other.label, mean, len(rounded), differing, p))
    return tests


def _by_pair(entry: ReportEntry, metric: str) -> dict[tuple[int, str], float]:
    """Map (seed, silo) to test score, of the silos with this metric if one is given.

    Silos tested on the same rows are no repetitions: they count as one.
    """
    scores: dict[tuple[int, str], float] = {}
    for run in entry.runs:
        if not run.shares_test_rows:
            for name, silo in run.summary["silos"].items():
                if silo.get("test") is not None and metric in ("", silo.get("metric")):
                    scores[run.seed, name] = float(silo["test"])
        elif run.summary["average"] is not None:
            scores[run.seed, _CENTRAL] = float(run.summary["average"])
    return scores


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's step-down method (1979).

    The k-th smallest of m p-values is multiplied by m − k + 1; the results are made monotone and at most 1.
    """
    adjusted, largest = list(values), 0.0
    for rank, position in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[position]))
        adjusted[position] = largest
    return adjusted


def headline(results: Results) -> str:
    """Say in one sentence what the silos reach together and what each reaches alone; empty without both in the table.

    Together is the entry that sends something and has the best validation scores: test scores choose nothing.
    """
    alone = [entry for entry in results.entries if entry.first.summary["method"] == "local"]
    sending = [entry for entry in results.entries if entry not in alone and entry.mean_of("bytes_up")]
    if not alone or not sending or len(results.parts) > 1 or results.averages != [AVERAGE]:
        return ""
    try:
        together = best_by_validation(sending)
    except InputError:  # no validation rows
        return ""
    pair = [results.score(entry.label, AVERAGE) for entry in (together, alone[0])]
    if None in pair:
        return ""
    metric, number, label = results.metric(AVERAGE), len(results.silos), together.label
    right = metric == "accuracy"
    ours, own = (f"{score.mean:.{0 if right else 1}f}" for score in pair if score)
    silos = f"the {_NUMBERS[number] if number < len(_NUMBERS) else number} silos"
    reach = "label {} of 100 test rows right" if right else f"reach a test {metric_title(metric)} of {{}}"
    if ours == own:
        return f"Alone and together ({label}) {silos} {reach.format(own)}: sharing does not help here."
    if (float(ours) < float(own)) != results.lower(AVERAGE):
        return f"Alone {silos} {reach.format(own)}, together ({label}) {ours}: sharing does not help here."
    low, high = results.interval(together, AVERAGE) or (math.nan, math.nan)
    unsure = "; the difference may be chance" if low <= float(own) <= high else ""
    return f"Together ({label}) {silos} {reach.format(ours)}, alone {own}{unsure}."


def beaten_by_words(results: Results) -> list[str]:
    """Say where a bag of words scores better than every method, a sentence for each data set; none otherwise."""
    sentences = []
    for number, part in enumerate(results.parts, 1):
        better = []
        for column in [*part.distinct_silos, *part.averages]:
            of_words = part.score(TITLES[BAG_OF_WORDS], column)
            means = [score.mean for entry in part.entries if (score := part.score(entry.label, column))]
            if of_words is not None and means:
                best = min(means) if part.lower(column) else max(means)
                if of_words.mean < best if part.lower(column) else of_words.mean > best:
                    better.append(f"{column} ({of_words.mean:.2f}, best method {best:.2f})")
        if better:
            more = f" and {len(better) - _MOST_NAMED} more" if len(better) > _MOST_NAMED else ""
            data = f" of data {number}" if len(results.parts) > 1 else ""
            named = ", ".join(better[:_MOST_NAMED])
            sentences.append(f"A bag of words is better than all methods{data} on {named}{more}")
    return sentences


def best_by_validation(entries: Sequence[ReportEntry]) -> ReportEntry:
    """Return the entry with the best mean validation score over silos and seeds; the first of equals.

    Where silos were judged by a loss, or a metric that is better if lower, the lowest mean is the best.
    """
    judged = {
        (
            entry.first.evaluated_on,
            tuple(str(s.get("validation_metric", s["metric"])) for s in run.summary["silos"].values()),
        )
        for entry in entries
        for run in entry.runs
    }
    if len(judged) != 1:
        raise InputError("best: the entries differ in their data or metrics; allowed: a comparison of one data set")
    means = [_validation(entry) for entry in entries]
    ((_, metrics),) = judged
    return entries[means.index(min(means) if any(map(lower_is_better, metrics)) else max(means))]


def _validation(entry: ReportEntry) -> float:
    """Return an entry's validation score, its mean over seeds and silos; silos without validation rows are left out."""
    scores = []
    for run in entry.runs:
        of_silos = [silo["validation"] for silo in run.summary["silos"].values() if silo["validation"] is not None]
        if not of_silos:
            raise InputError(f"best: {run.folder} has no validation score; allowed: runs with validation rows")
        scores.append(statistics.fmean(of_silos))
    return statistics.fmean(scores)
