"""`scores_of` and `roc_areas`: metrics of labels from counts of rows, for one set of rows or many resamples at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[Any]


def scores_of(hits: Counts, true: Counts, predicted: Counts, positive: int) -> dict[str, Counts]:
    """Score confusion matrices, in percent; a ratio without denominator is 0.

    Args:
        hits: rows of each class that are predicted as it, shape (…, classes).
        true: rows of each class, same shape.
        predicted: rows predicted as each class, same shape.
        positive: index of the class that F1 is about; −1 if none is.

    Returns:
        metric → scores, shape (…): `accuracy`; `macro_f1`, the mean over classes that occur or are predicted;
        `balanced_accuracy`, the mean recall of classes that occur; `mcc`, Matthews' correlation coefficient; `f1` if
        there is a positive class.
    """
    rows = true.sum(-1)
    f1 = ratio(2 * hits, true + predicted)
    covariance = hits.sum(-1) * rows - (true * predicted).sum(-1)
    spread = np.sqrt((rows**2 - (true**2).sum(-1)) * (rows**2 - (predicted**2).sum(-1)))
    scores = {
        "accuracy": hits.sum(-1) / rows,
        "macro_f1": f1.sum(-1) / ((true + predicted) > 0).sum(-1),
        "balanced_accuracy": ratio(hits, true).sum(-1) / (true > 0).sum(-1),
        "mcc": ratio(covariance, spread),
    }
    if positive >= 0:
        scores["f1"] = f1[..., positive]
    return {name: 100 * values for name, values in scores.items()}


def roc_areas(drawn: Counts, positive: Counts, score: Counts) -> Counts:
    """Return the areas under ROC curves, shape (resamples,); NaN without rows of the class, or without others.

    The area is the chance that a row of the class has a larger score than a row of another class, ties counting half
    (Hanley and McNeil 1982).

    Args:
        drawn: how often each row counts, shape (resamples, rows).
        positive: whether each row is of the class, shape (rows,).
        score: each row's score of the class, shape (rows,).
    """
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.diff(score[order], prepend=-np.inf))  # rows of equal score count together
    inside = np.add.reduceat(drawn[:, order] * positive[order], starts, axis=1)
    outside = np.add.reduceat(drawn[:, order] * ~positive[order], starts, axis=1)
    below = outside.cumsum(1) - outside
    pairs = inside.sum(1) * outside.sum(1)
    ordered = (inside * (below + outside / 2)).sum(1)
    areas: Counts = np.divide(ordered, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)
    return areas


def ratio(numerator: Counts, denominator: Counts) -> Counts:
    """Divide; 0 where the denominator is 0."""
    zeros = np.zeros_like(numerator, dtype=float)
    quotient: Counts = np.divide(numerator, denominator, out=zeros, where=denominator > 0)
    return quotient
