"""`baseline_rows`: rows of the baselines (most frequent label, bag of words) for a report's tables."""

from __future__ import annotations

from collections.abc import Sequence

from silotune.data.metrics import lower_is_better
from silotune.evaluation.baselines import BAG_OF_WORDS
from silotune.lab.report.entries import ReportEntry, distinguishable_silos, group_by_data
from silotune.lab.report.scores import Score, average_columns, mean_score, metric_name, over_seeds
from silotune.runs.scores import TITLES, baseline_of

NOTE = (
    "Baselines learn from a silo's own training rows (of a partitioned data set, from all of them): the most frequent "
    "label (of numbers, their mean), and logistic (of numbers, ridge) regression over the TF-IDF of words and pairs of "
    "words."
)

_MOST_NAMED = 6
"""Silos and averages that a sentence names."""

BaselineRow = tuple[str, list[Score | None]]
"""A baseline's label, and its score in every column."""


def baseline_rows(entries: Sequence[ReportEntry], columns: Sequence[str], ddof: int) -> list[BaselineRow]:
    """Return a row for each baseline and data set, over the seeds of the entry with most runs.

    Args:
        entries: the methods' entries.
        columns: silos and averages.
        ddof: the standard deviation over n seeds has the divisor n − ddof.

    Returns:
        The rows; none if no run has baselines.
    """
    groups = group_by_data(entries)
    rows: list[BaselineRow] = []
    for number, group in enumerate(groups, 1):
        runs = max(group, key=lambda entry: len(entry.runs)).runs
        for key, title in TITLES.items():
            scores = [_score([baseline_of(run.summary, column, key) for run in runs], ddof) for column in columns]
            if any(score is not None for score in scores):
                rows.append((title if len(groups) == 1 else f"{title}, data {number}", scores))
    return rows


def beaten_by_words(entries: Sequence[ReportEntry]) -> list[str]:
    """Say where a bag of words scores better than every method, a sentence for each data set; none otherwise."""
    sentences = []
    groups = group_by_data(entries)
    for number, group in enumerate(groups, 1):
        columns = [*distinguishable_silos(group), *average_columns(group)]
        words = dict(baseline_rows(group, columns, 1)).get(TITLES[BAG_OF_WORDS], [])
        better = [
            f"{column} ({of_words.mean:.2f}, best method {best:.2f})"
            for column, of_words in zip(columns, words, strict=False)
            if of_words is not None and (best := _best_below(group, column, of_words.mean)) is not None
        ]
        if better:
            more = f" and {len(better) - _MOST_NAMED} more" if len(better) > _MOST_NAMED else ""
            data = f" of data {number}" if len(groups) > 1 else ""
            sentences.append(
                f"A bag of words is better than all methods{data} on {', '.join(better[:_MOST_NAMED])}{more}"
            )
    return sentences


def _best_below(entries: Sequence[ReportEntry], column: str, of_words: float) -> float | None:
    """Return the best method's mean score in a column if it is worse than that of a bag of words."""
    means = [score.mean for entry in entries if (score := mean_score(entry, column))]
    if not means:
        return None
    lower = lower_is_better(metric_name(entries[0], column))
    best = min(means) if lower else max(means)
    return best if (of_words < best if lower else of_words > best) else None


def _score(values: Sequence[float | None], ddof: int) -> Score | None:
    numbers = [value for value in values if value is not None]
    return over_seeds(numbers, ddof)
