"""`Bootstrap` makes intervals of scores over test rows: percentiles of the scores of resampled rows, seeded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silotune.core.randomness import derive
from silotune.data.metrics import METRICS, Classified

LEVEL = 95
"""The intervals' level in percent."""

Interval = tuple[float, float]

_MOST_NUMBERS = 4_000_000
"""Numbers of one piece of a resample's counts, which bounds the memory."""

Counts = NDArray[Any]


class Bootstrap:
    """Draws resamples of rows, as many as there are rows, with replacement.

    Args:
        resamples: how many; with 0 there are no intervals.
        seed: the run's seed.
        purpose: what is resampled, such as a silo's name; the same purpose gives the same intervals.
    """

    def __init__(self, resamples: int, seed: int, *purpose: str) -> None:
        self._resamples = resamples
        self._seed = derive(seed, "bootstrap", *purpose)

    def of_classes(self, rows: Classified) -> dict[str, Interval]:
        """Return intervals of the metrics that follow from a confusion matrix, by the name of the metric.

        A resample of rows is a multinomial draw of the cells of their confusion matrix, so that many resamples are
        scored at once. Metrics are defined as in `data/metrics.py`.
        """
        if not self._resamples or not len(rows.labels):
            return {}
        pairs, counts = np.unique(np.stack(rows.arrays, 1), axis=0, return_counts=True)
        classes = rows.logits.shape[1]
        true, predicted = np.eye(classes)[pairs[:, 0]], np.eye(classes)[pairs[:, 1]]
        hit = true * predicted
        scores: dict[str, list[Counts]] = {}
        for drawn in self._draw(counts, classes):
            marginals = drawn @ hit, drawn @ true, drawn @ predicted
            for name, values in _scores_of(*marginals, positive=rows.positive).items():
                scores.setdefault(name, []).append(values)
        return {name: _interval(np.concatenate(values)) for name, values in scores.items()}

    def of_areas(self, rows: Classified) -> Interval | None:
        """Return the interval of AUROC; None where it is not defined.

        A class's area is the chance that a row of it has a larger probability of it than a row of another class, ties
        counting half (Hanley and McNeil 1982). Resamples without one of the two are left out.
        """
        classes = [1] if rows.logits.shape[1] == 2 else sorted({*rows.labels.tolist()})
        if not self._resamples or METRICS["auroc"](rows) is None:
            return None
        labels, probabilities = rows.labels.numpy(), rows.probabilities.numpy()
        areas = []
        for drawn in self._draw(np.ones(len(labels), dtype=int), 1):
            by_class = [_areas(drawn, labels == of, probabilities[:, of]) for of in classes]
            areas.append(np.mean(by_class, axis=0))
        values = np.concatenate(areas)
        return _interval(100 * values[~np.isnan(values)])

    def of_means(self, row_scores: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
        """Return intervals of means over rows, in percent.

        Args:
            row_scores: metric → each row's score, between 0 and 1.
        """
        if not self._resamples:
            return {}
        names, values = [*row_scores], np.array([*row_scores.values()]).T
        means = [drawn @ values / len(values) for drawn in self._draw(np.ones(len(values), dtype=int), 1)]
        return {name: _interval(100 * column) for name, column in zip(names, np.concatenate(means).T, strict=True)}

    def _draw(self, counts: Counts, width: int) -> Iterator[Counts]:
        """Yield resamples of cells with these counts, shape (resamples, cells), in pieces of bounded size."""
        generator, rows = np.random.default_rng(self._seed), int(counts.sum())
        piece = max(1, _MOST_NUMBERS // max(len(counts), width))
        sizes = [min(piece, self._resamples - start) for start in range(0, self._resamples, piece)]
        for size in sizes:
            yield generator.multinomial(rows, counts / rows, size=size)


def _interval(values: Counts) -> Interval:
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def _scores_of(hits: Counts, true: Counts, predicted: Counts, positive: int) -> dict[str, Counts]:
    """Score confusion matrices, given per class: hits, rows of the class, rows predicted as it, each (…, classes)."""
    rows = true.sum(-1)
    f1 = _ratio(2 * hits, true + predicted)
    covariance = hits.sum(-1) * rows - (true * predicted).sum(-1)
    spread = np.sqrt((rows**2 - (true**2).sum(-1)) * (rows**2 - (predicted**2).sum(-1)))
    scores = {
        "accuracy": hits.sum(-1) / rows,
        "macro_f1": f1.sum(-1) / ((true + predicted) > 0).sum(-1),
        "balanced_accuracy": _ratio(hits, true).sum(-1) / (true > 0).sum(-1),
        "mcc": _ratio(covariance, spread),
    }
    if positive >= 0:
        scores["f1"] = f1[..., positive]
    return {name: 100 * values for name, values in scores.items()}


def _areas(drawn: Counts, positive: Counts, score: Counts) -> Counts:
    """Return the area under the ROC curve of every resample of rows, shape (resamples,); NaN without both kinds."""
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.diff(score[order], prepend=-np.inf))  # rows of equal score count together
    inside = np.add.reduceat(drawn[:, order] * positive[order], starts, axis=1)
    outside = np.add.reduceat(drawn[:, order] * ~positive[order], starts, axis=1)
    below = outside.cumsum(1) - outside
    pairs = inside.sum(1) * outside.sum(1)
    ordered = (inside * (below + outside / 2)).sum(1)
    areas: Counts = np.divide(ordered, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)
    return areas


def _ratio(numerator: Counts, denominator: Counts) -> Counts:
    """Divide; 0 where the denominator is 0."""
    zeros = np.zeros_like(numerator, dtype=float)
    ratio: Counts = np.divide(numerator, denominator, out=zeros, where=denominator > 0)
    return ratio
