"""Compute all metrics of test rows with intervals, per-label scores, confusion matrix and calibration.

They are written into the run folder, or at a silo into its own: a coordinator gets the score alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from silotune.data.scores import METRICS, Classified, Counts, all_scores, exact_matches, perplexity, ratio, rouge_scores
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.bootstrap import Bootstrap
from silotune.evaluation.predict import Measured

BINS = 15
"""Bins of the calibration error, as in Guo et al. 2017."""

MOST_CLASSES = 100
"""Classes up to which there is a confusion matrix."""


def score_details(measured: Measured, rows: TokenizedRows, bootstrap: Bootstrap) -> dict[str, Any] | None:
    """Compute all metrics of predictions, with intervals, per-class scores and the confusion matrix.

    Returns:
        JSON values: `metric`, `score`, `rows`, `metrics` (name → score) and `intervals` (name → two bounds); of rows
        with labels also `per_class`, and if they have one each `confusion` (true class, predicted class) and
        `calibration`. None without rows.
    """
    if not rows.examples:
        return None
    task, losses = rows.task, {}
    if measured.loss is not None:
        losses["loss"] = measured.loss
        if task.kind == "generation" and not rows.pairs:
            losses["perplexity"] = perplexity(measured.loss)
    details: dict[str, Any] = {"metrics": {}, "intervals": {}}
    if measured.logits is not None and task.kind != "classification":
        details = target_details(measured.logits, rows, bootstrap)
    elif measured.logits is not None:
        details = label_details(Classified(measured.logits, rows.labels, task.positive_index), task, bootstrap)
    elif measured.written is not None and rows.answers is not None:
        by_row = {kind: rouge_scores(kind, measured.written, rows.answers) for kind in ("rouge1", "rougeL")}
        by_row["exact_match"] = exact_matches(measured.written, rows.answers)
        if task.metric == "accuracy":  # of answers that are options
            by_row["accuracy"] = by_row["exact_match"]
        details["metrics"] = {name: 100 * sum(scores) / len(scores) for name, scores in by_row.items()}
        details["intervals"] = bootstrap.of_means(by_row)
    details["metrics"] = {name: finite(value) for name, value in (details["metrics"] | losses).items()}
    return {"metric": task.metric, "score": finite(measured.score), "rows": rows.examples, **details}


def target_details(logits: Tensor, rows: TokenizedRows, bootstrap: Bootstrap) -> dict[str, Any]:
    """Return `metrics` and `intervals` of numbers or sets of labels; `per_class` of these."""
    task = rows.task
    details: dict[str, Any] = {
        "metrics": all_scores(task, logits, rows.labels),
        "intervals": bootstrap.of_targets(task, logits, rows.labels),
    }
    if task.kind == "multilabel":
        said, true = (marks.numpy() for marks in (logits > 0, rows.labels > 0))
        details["per_class"] = class_table(task, (said & true).sum(0), true.sum(0), said.sum(0))
    return details


def class_table(task: Task, hits: Counts, true: Counts, said: Counts) -> dict[str, dict[str, float]]:
    """Return label → precision, recall, F1 (percent) and rows.

    Args:
        task: names the labels.
        hits: rows of each label that are predicted to have it, shape (labels,).
        true: rows of each label.
        said: rows predicted to have it.
    """
    hits = hits.astype(float)
    columns = ratio(hits, said), ratio(hits, true), ratio(2 * hits, true + said), true
    return {
        name: {"precision": 100 * float(p), "recall": 100 * float(r), "f1": 100 * float(f), "rows": int(number)}
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
    """Return the mean of −log of the true class's probability, in float64; no probability counts as less than ε."""
    of_true = rows.probabilities.gather(1, rows.labels[:, None])
    return float(-of_true.clamp(min=np.finfo(float).eps).log().mean())


def calibration_curve(rows: Classified) -> dict[str, Any]:
    """Return the reliability diagram of the predicted classes and its expected calibration error.

    Returns:
        `confidence` and `accuracy` (shares) and `rows` of every bin that has rows, of `BINS` equally wide ones; `error`
        is the mean distance of the two, weighted by rows (ECE, Guo et al. 2017, eq. 3).
    """
    confidence, right = rows.probabilities.max(-1).values.numpy(), (rows.predicted == rows.labels).numpy()
    confidence = np.clip(confidence, 0, 1)  # a sum of rounded shares may exceed 1
    bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], confidence)
    numbers, hits, sums = (np.bincount(bins, weights, BINS) for weights in (None, right, confidence))
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
