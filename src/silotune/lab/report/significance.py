"""Say in a sentence which entry of a report is best: by validation, and beside a bag of words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from silotune.data.tasks import lower_is_better, metric_title
from silotune.errors import InputError
from silotune.evaluation.baselines import BAG_OF_WORDS
from silotune.lab.report.entries import ReportEntry
from silotune.lab.report.frame import Results
from silotune.runs.scores import ALWAYS_NAMED, AVERAGE

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

_MOST_NAMED = 6
"""Silos and averages that a sentence names."""


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
            of_words = part.score(ALWAYS_NAMED[BAG_OF_WORDS], column)
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
