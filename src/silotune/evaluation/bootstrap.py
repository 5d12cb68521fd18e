"""Compute intervals of scores over test rows: percentiles over resampled rows, drawn from the seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from silotune.core.randomness import derive
from silotune.data.scores import METRICS, Classified, Counts, resampled_scores, roc_areas, scores_of
from silotune.data.tasks import Task

LEVEL = 95
"""The intervals' level in percent."""

Interval = tuple[float, float]

_MOST_NUMBERS = 4_000_000
"""Numbers of one piece of a resample's counts, which bounds the memory."""


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
        scored at once. Metrics are those of `scores_of`.
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
            for name, values in scores_of(*marginals, positive=rows.positive).items():
                scores.setdefault(name, []).append(values)
        return {name: _interval(np.concatenate(values)) for name, values in scores.items()}

    def of_areas(self, rows: Classified) -> Interval | None:
        """Return the interval of AUROC; None where it is not defined.

        Resamples without rows of a class, or without others, are left out.
        """
        classes = [1] if rows.logits.shape[1] == 2 else sorted({*rows.labels.tolist()})
        if not self._resamples or METRICS["auroc"](rows) is None:
            return None
        labels, probabilities = rows.labels.numpy(), rows.probabilities.numpy()
        areas = []
        for drawn in self._draw(np.ones(len(labels), dtype=int), 1):
            by_class = [roc_areas(drawn, labels == of, probabilities[:, of]) for of in classes]
            areas.append(np.mean(by_class, axis=0))
        values = np.concatenate(areas)
        return _interval(100 * values[~np.isnan(values)])

    def of_targets(self, task: Task, logits: Tensor, targets: Tensor) -> dict[str, Interval]:
        """Return intervals of the metrics of numbers or sets of labels, by the name of the metric.

        Resamples in which a metric is not defined are left out; a metric that none defines has no interval.

        Args:
            task: the rows' task.
            logits: shape (rows, outputs).
            targets: what they are compared with.
        """
        if not self._resamples or not len(targets):
            return {}
        scores: dict[str, list[Counts]] = {}
        for drawn in self._draw(np.ones(len(targets), dtype=int), 1):
            for name, values in resampled_scores(task, logits, targets, drawn).items():
                scores.setdefault(name, []).append(values[~np.isnan(values)])
        known = {name: np.concatenate(values) for name, values in scores.items()}
        return {name: _interval(values) for name, values in known.items() if len(values)}

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
