"""Compute all metrics of test rows with (bootstrap) intervals, per-label scores, confusion matrix and calibration.

They are written into the run folder, or at a silo into its own: a coordinator gets the score alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from silotune.core.randomness import derive
from silotune.data.scores import (
    METRICS,
    Classified,
    Counts,
    all_scores,
    exact_matches,
    perplexity,
    ratio,
    roc_areas,
    rouge_scores,
    scores_of,
)
from silotune.data.tasks import LOSS_METRICS, Task
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.predict import Measured

LEVEL = 95
"""The intervals' level in percent."""

Interval = tuple[float, float]

_MOST_NUMBERS = 4_000_000
"""Numbers of one piece of a resample's counts, which bounds the memory."""


class Bootstrap:
    """Draws resamples of rows, as many as there are rows, with replacement; without resamples there are no intervals.

    The same seed and purpose, such as a silo's name, give the same intervals.
    """

    def __init__(self, resamples: int, seed: int, *purpose: str) -> None:
        self._resamples = resamples
        self._seed = derive(seed, "bootstrap", *purpose)

    def of_classes(self, rows: Classified) -> dict[str, Interval]:
        """Return intervals of the metrics that follow from a confusion matrix, by the name of the metric.

        A resample of rows is a multinomial draw of the cells of their confusion matrix (rows that count differently
        are in cells apart), so that many resamples are scored at once. Metrics are those of `scores_of`.
        """
        if not len(rows.labels):
            return {}
        cells, counts = np.unique(np.stack([*rows.arrays, rows.counted], 1), axis=0, return_counts=True)
        classes, (label, guess) = rows.logits.shape[1], cells[:, :2].astype(int).T
        true, predicted = (cells[:, 2:] * np.eye(classes)[of] for of in (label, guess))
        hit = true * np.eye(classes)[guess]
        return self._intervals(
            counts,
            lambda drawn: scores_of(drawn @ hit, drawn @ true, drawn @ predicted, positive=rows.positive),
            classes,
        )

    def of_average(self, silos: Sequence[Classified], metric: str) -> Interval | None:
        """Return the interval of the mean of silos' scores on the same rows, each drawn once for all of them."""

        def mean(drawn: Counts) -> dict[str, Counts]:
            return {metric: np.mean([_resampled(rows, metric, drawn) for rows in silos], axis=0)}

        return self._intervals(np.ones(len(silos[0].labels), dtype=int), mean).get(metric)

    def of_areas(self, rows: Classified) -> Interval | None:
        """Return the interval of AUROC; None where it is not defined, as in resamples without rows of a class."""
        return None if METRICS["auroc"](rows) is None else self.of_average([rows], "auroc")

    def of_targets(
        self, task: Task, logits: Tensor, targets: Tensor, examples: int | None = None
    ) -> dict[str, Interval]:
        """Return intervals of the metrics of kinds without single labels, by the name of the metric.

        `examples` is the number of rows where targets have several lines for each.
        """
        if not len(targets):
            return {}
        counts = np.ones(examples or len(targets), dtype=int)
        return self._intervals(counts, partial(task.rules.scores, task, logits, targets))

    def of_means(self, row_scores: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
        """Return intervals of means over rows, in percent; `row_scores` has each row's score by metric, from 0 to 1."""
        values = np.array([*row_scores.values()]).T

        def means(drawn: Counts) -> dict[str, Counts]:
            return dict(zip(row_scores, 100 * (drawn @ values / len(values)).T, strict=True))

        return self._intervals(np.ones(len(values), dtype=int), means)

    def _intervals(
        self, counts: Counts, score: Callable[[Counts], Mapping[str, Counts]], width: int = 1
    ) -> dict[str, Interval]:
        """Return the intervals of resamples' scores by metric; resamples in which one is not defined are left out."""
        scores: dict[str, list[Counts]] = {}
        for drawn in self._draw(counts, width):
            for name, values in score(drawn).items():
                scores.setdefault(name, []).append(values[~np.isnan(values)])
        by_metric = {name: np.concatenate(values) for name, values in scores.items()}
        return {name: _interval(values) for name, values in by_metric.items() if len(values)}

    def _draw(self, counts: Counts, width: int) -> Iterator[Counts]:
        """Yield resamples of cells with these counts, shape (resamples, cells), in pieces of bounded size."""
        generator, rows = np.random.default_rng(self._seed), int(counts.sum())
        piece = max(1, _MOST_NUMBERS // max(len(counts), width))
        sizes = [min(piece, self._resamples - start) for start in range(0, self._resamples, piece)]
        for size in sizes:
            yield generator.multinomial(rows, counts / rows, size=size)


def _resampled(rows: Classified, metric: str, drawn: Counts) -> Counts:
    """Score resamples by how often they draw each row, shape (resamples, rows), by a metric of labels."""
    (labels, predicted), classes, counted = rows.arrays, rows.logits.shape[1], drawn * rows.counted
    if metric == "auroc":
        of_classes = [1] if classes == 2 else sorted({*labels.tolist()})
        probabilities = rows.probabilities.numpy()
        areas = [roc_areas(counted, labels == of, probabilities[:, of]) for of in of_classes]
        return np.asarray(100 * np.mean(areas, axis=0))
    true, guesses = np.eye(classes)[labels], np.eye(classes)[predicted]
    return scores_of(counted @ (true * guesses), counted @ true, counted @ guesses, positive=rows.positive)[metric]


def _interval(values: Counts) -> Interval:
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


BINS = 15
"""Bins of the calibration error, as in Guo et al. 2017."""

MOST_CLASSES = 100
"""Classes up to which there is a confusion matrix."""


def score_details(measured: Measured, rows: TokenizedRows, bootstrap: Bootstrap) -> dict[str, Any] | None:
    """Compute all metrics of predictions, with intervals, per-class scores and the confusion matrix.

    JSON values: `metric`, `score`, `rows`, `metrics` (name → score) and `intervals` (name → two bounds); of rows with
    labels also `per_class`, and if they have one each `confusion` (true class, predicted class) and `calibration`.
    Where answers are labels or options, `commonest` is the most frequent one and its share in percent. None without
    rows.
    """
    if not rows.judges:
        return None
    task, losses = rows.task, {}
    if measured.loss is not None:
        losses["loss"] = measured.loss
        if not task.labeled and not rows.pairs:
            losses["perplexity"] = perplexity(measured.loss)
    details: dict[str, Any] = {"metrics": {}, "intervals": {}}
    of_labels = task.rules.one_label and {*task.rules.metrics} <= {*METRICS, *LOSS_METRICS}
    if measured.logits is not None and not of_labels:
        details = target_details(measured.logits, rows, bootstrap)
    elif measured.logits is not None:
        classified = Classified(measured.logits, rows.labels, task.positive_index, rows.weights)
        details = label_details(classified, task, bootstrap)
        counts = classified.counts[2]
        details["commonest"] = [task.labels[int(counts.argmax())], 100 * float(counts.max() / counts.sum())]
    elif measured.written is not None and rows.answers is not None:
        by_row = {kind: rouge_scores(kind, measured.written, rows.answers) for kind in ("rouge1", "rougeL")}
        by_row["exact_match"] = exact_matches(measured.written, rows.answers)
        if task.metric == "accuracy":  # of answers that are options
            by_row["accuracy"] = by_row["exact_match"]
        details["metrics"] = {name: 100 * sum(scores) / len(scores) for name, scores in by_row.items()}
        if rows.options:
            answer, number = Counter(text.strip() for text in measured.written).most_common(1)[0]
            details["commonest"] = [answer, 100 * number / len(rows)]
            details["metrics"]["balanced_accuracy"] = balanced_matches(by_row["exact_match"], rows.answers)
        details["intervals"] = bootstrap.of_means(by_row)
    details["metrics"] = {name: finite(value) for name, value in (details["metrics"] | losses).items()}
    return {"metric": task.metric, "score": finite(measured.score), "rows": rows.examples, **details}


def balanced_matches(matches: Sequence[float], answers: Sequence[str]) -> float:
    """Return the mean over the expected answers of the share of their rows that are right, in percent."""
    of_answer: dict[str, list[float]] = {}
    for match, answer in zip(matches, answers, strict=True):
        of_answer.setdefault(answer.strip(), []).append(match)
    return 100 * sum(sum(each) / len(each) for each in of_answer.values()) / len(of_answer)


def target_details(logits: Tensor, rows: TokenizedRows, bootstrap: Bootstrap) -> dict[str, Any]:
    """Return `metrics` and `intervals` of rows that have not one label each; `per_class` where labels have a table."""
    task = rows.task
    details: dict[str, Any] = {
        "metrics": all_scores(task, logits, rows.labels),
        "intervals": bootstrap.of_targets(task, logits, rows.labels, rows.examples),
    }
    if counts := task.rules.by_label(task, logits, rows.labels):
        details["per_class"] = class_table(task, *counts)
    return details


def class_table(task: Task, hits: Counts, true: Counts, predicted: Counts) -> dict[str, dict[str, float]]:
    """Return label → precision, recall, F1 (percent) and rows.

    Counts have the shape (labels,): `true` rows of each label, rows that are `predicted` to have it, and both (`hits`).
    Where rows have weights, `rows` is the sum of these, rounded.
    """
    hits = hits.astype(float)
    columns = ratio(hits, predicted), ratio(hits, true), ratio(2 * hits, true + predicted), true
    return {
        name: {"precision": 100 * float(p), "recall": 100 * float(r), "f1": 100 * float(f), "rows": round(number)}
        for name, p, r, f, number in zip(task.labels, *columns, strict=True)
    }


def label_details(rows: Classified, task: Task, bootstrap: Bootstrap) -> dict[str, Any]:
    """Return `metrics`, `intervals`, `per_class`, `confusion` and `calibration` of rows with labels."""
    names = [name for name in METRICS if name != "f1" or rows.positive >= 0]
    metrics: dict[str, float | None] = {name: METRICS[name](rows) for name in names}
    calibration = None
    if rows.has_probabilities:
        calibration = calibration_curve(rows)
        metrics["ece"] = 100 * calibration.pop("error")
        metrics["log_loss"] = log_loss(rows)
    intervals: dict[str, Any] = dict(bootstrap.of_classes(rows))
    if task.metric == "auroc":
        interval = bootstrap.of_areas(rows)
        intervals |= {"auroc": interval} if interval is not None else {}
    return {
        "metrics": metrics,
        "intervals": {name: intervals[name] for name in names if name in intervals},
        **({"positive": task.positive} if task.positive else {}),
        "per_class": class_table(task, *rows.counts),
        "confusion": confusion_matrix(rows).tolist() if len(task.labels) <= MOST_CLASSES else None,
        "calibration": calibration,
    }


def confusion_matrix(rows: Classified) -> Counts:
    """Return the rows of each true class (first axis) and predicted class (second axis)."""
    (labels, predicted), classes = rows.arrays, rows.logits.shape[1]
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)


def log_loss(rows: Classified) -> float:
    """Return the mean of −log of the true class's probability, in float64; no probability counts as less than ε.

    Rows count by their weights.
    """
    of_true = rows.probabilities.gather(1, rows.labels[:, None])
    losses = -of_true[:, 0].clamp(min=np.finfo(float).eps).log()
    return float(losses.mean()) if rows.weights is None else float(losses @ rows.weights / rows.weights.sum())


def calibration_curve(rows: Classified) -> dict[str, Any]:
    """Return the reliability diagram of the predicted classes and its expected calibration error.

    It has `confidence` and `accuracy` (shares) and `rows` of every bin that has rows, of `BINS` equally wide ones;
    `error` is the mean distance of the two, weighted by rows (ECE, Guo et al. 2017, eq. 3).
    """
    confidence, right = rows.probabilities.max(-1).values.numpy(), (rows.predicted == rows.labels).numpy()
    confidence = np.clip(confidence, 0, 1)  # a sum of rounded shares may exceed 1
    bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], confidence)
    numbers, hits, sums = (np.bincount(bins, rows.counted * of, BINS) for of in (np.ones(len(bins)), right, confidence))
    filled = numbers > 0
    weights, accuracy, mean_confidence = numbers[filled], hits[filled] / numbers[filled], sums[filled] / numbers[filled]
    return {
        "confidence": mean_confidence.tolist(),
        "accuracy": accuracy.tolist(),
        "rows": weights.tolist(),
        "error": float((weights * np.abs(accuracy - mean_confidence)).sum() / weights.sum()),
    }


def finite(value: float | None) -> float | None:
    """Return a number as JSON can hold it: None for infinity and NaN."""
    return value if value is not None and math.isfinite(value) else None
