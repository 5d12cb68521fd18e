"""Judge by one rule whether an entry of a comparison is equal to its reference, better, worse, or undecided.

The difference of two entries is a mean over silos, then over repetitions (seeds). It varies by two independent causes:
what a repetition draws (start, batches, a partition's silos), and which test rows there happen to be.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from scipy.stats import norm, t

_LEVEL, _INNER = 0.95, 0.90
"""Levels of the interval that tells better from worse, and of the one that must lie within the margin (two one-sided
tests at 5 %, Schuirmann 1987)."""

_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Differences:
    """Paired differences of an entry and its reference, in points; above 0 the entry is better.

    Args:
        by_seed: of each repetition, the mean over silos.
        rows_variance: variance of their mean because of the test rows that all repetitions share; 0 if each repetition
            has rows of its own, whose variance is then in `by_seed`.
        rows: number of the shared test rows, of all silos; 0 if each repetition has its own.
    """

    by_seed: tuple[float, ...]
    rows_variance: float = 0.0
    rows: int = 0

    @property
    def mean(self) -> float:
        """The mean over repetitions."""
        return statistics.fmean(self.by_seed)

    @property
    def variance(self) -> float:
        """The variance of repetitions; infinite with fewer than two."""
        return statistics.variance(self.by_seed) if len(self.by_seed) > 1 else math.inf

    def half_width(self, level: float, seeds: int | None = None) -> float:
        """Return half of the width of the mean's confidence interval, as it would be with so many repetitions.

        The squares of the half-widths of both causes are added (Graybill and Wang 1980). A t distribution with
        Satterthwaite's degrees of freedom would cover 92.2 instead of 95 % at three seeds with a small variance of
        rows (`benchmarks verdicts`); this covers at least 95 %.
        """
        number, tail = seeds or len(self.by_seed), (1 + level) / 2
        if not math.isfinite(self.variance):
            return math.inf
        by_seed = float(t.ppf(tail, number - 1)) ** 2 * self.variance / number
        return math.sqrt(by_seed + float(norm.ppf(tail)) ** 2 * self.rows_variance)


@dataclass(frozen=True)
class Verdict:
    """What the rule says of one difference.

    Args:
        entry, reference: labels in the table.
        word: equal, better, worse, undecided or not judged.
        remark: what would decide, or why nothing was judged; empty if the word says it all.
        mean: the difference in points; above 0 the entry is better.
        interval: at 95 %, or at the level that Bonferroni's correction asks for.
        seeds: number of repetitions.
        primary: whether the comparison was named before the run, and is not corrected.
        exploratory: whether seeds were added after a look at the results that the plan did not name.
        column: the column of averages that is judged.
    """

    entry: str
    reference: str
    word: str
    remark: str = ""
    mean: float = math.nan
    interval: tuple[float, float] = (math.nan, math.nan)
    seeds: int = 0
    primary: bool = False
    exploratory: bool = False
    column: str = ""

    @property
    def text(self) -> str:
        """The word with its remark."""
        marks = [mark for mark, holds in (("primary", self.primary), ("exploratory", self.exploratory)) if holds]
        word = f"{self.word} ({', '.join(marks)})" if marks else self.word
        return f"{word}: {self.remark}" if self.remark else word

    @property
    def interval_text(self) -> str:
        """The interval for display."""
        low, high = self.interval
        return f"{low:+.2f} to {high:+.2f}" if math.isfinite(low) else "–"


def judge(differences: Differences, margin: float, comparisons: int = 1) -> tuple[str, str, tuple[float, float]]:
    """Return word, remark and interval of a difference.

    Args:
        differences: at least one repetition.
        margin: a smaller difference, in points, does not matter.
        comparisons: number of comparisons that share the error of 5 % (Bonferroni).
    """
    mean, wide = differences.mean, differences.half_width(_corrected(_LEVEL, comparisons))
    interval = mean - wide, mean + wide
    word = word_of(differences, margin, comparisons, len(differences.by_seed))
    return word or "undecided", "" if word else _what_decides(differences, margin, comparisons), interval


def _corrected(level: float, comparisons: int) -> float:
    return 1 - (1 - level) / comparisons


def word_of(differences: Differences, margin: float, comparisons: int, seeds: int) -> str:
    """Return equal, better or worse as if so many repetitions had this mean and these variances, else nothing."""
    mean = differences.mean
    if abs(mean) + differences.half_width(_corrected(_INNER, comparisons), seeds) <= margin:
        return "equal"
    if abs(mean) > differences.half_width(_corrected(_LEVEL, comparisons), seeds):
        return "better" if mean > 0 else "worse"
    return ""


def _what_decides(differences: Differences, margin: float, comparisons: int) -> str:
    if len(differences.by_seed) < 2:
        return "one seed tells nothing of others"
    for seeds in _numbers_of_seeds(len(differences.by_seed)):
        if word_of(differences, margin, comparisons, seeds):
            return f"about {seeds:,} seeds would decide"
    rows = differences.rows * min(_times_rows(differences, margin, comparisons), default=math.inf)
    if not differences.rows or not math.isfinite(rows):
        return f"more than {_MOST_SEEDS:,} seeds would decide"
    return f"no number of seeds decides; about {math.ceil(rows):,} rows would"


def _numbers_of_seeds(at_hand: int) -> Iterator[int]:
    yield from range(at_hand + 1, 100)
    yield from range(100, _MOST_SEEDS + 1, 10)


def _times_rows(differences: Differences, margin: float, comparisons: int) -> Iterator[float]:
    """Yield how many times as many rows would decide with any number of seeds: by being apart, and by being equal."""
    for level, room in ((_LEVEL, abs(differences.mean)), (_INNER, margin - abs(differences.mean))):
        if room > 0:
            quantile = float(norm.ppf((1 + _corrected(level, comparisons)) / 2))
            yield quantile**2 * differences.rows_variance / room**2
