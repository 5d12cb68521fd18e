"""`number_scores`: metrics of predicted numbers (correlations, errors), of one set of rows or of many resamples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]

_CONSTANT = 1e-13
"""A standard deviation below this share of the mean is rounding, as in `scipy.stats.pearsonr`."""


def number_scores(predicted: Numbers, true: Numbers, drawn: Numbers | None = None) -> dict[str, Numbers]:
    """Score predicted numbers.

    Args:
        predicted: shape (rows,).
        true: the rows' own numbers, shape (rows,).
        drawn: how often each row counts, shape (resamples, rows); None: each once.

    Returns:
        metric → scores, shape (resamples,): `pearson` and `spearman`, the correlations × 100; `pearson_spearman`, their
        mean; `mse` and `mae`, the mean squared and absolute error in units of the labels. A correlation is 0 where all
        predictions are equal, and NaN where all true numbers are.
    """
    predicted, true = predicted.astype(float), true.astype(float)
    drawn = np.ones((1, len(true))) if drawn is None else drawn.astype(float)
    rows = drawn.sum(1)
    pearson = 100 * _correlation(predicted[None], true[None], drawn)
    spearman = 100 * _correlation(_ranks(predicted, drawn), _ranks(true, drawn), drawn)
    errors = predicted - true
    return {
        "pearson": pearson,
        "spearman": spearman,
        "pearson_spearman": (pearson + spearman) / 2,
        "mse": drawn @ errors**2 / rows,
        "mae": drawn @ np.abs(errors) / rows,
    }


def _correlation(first: Numbers, second: Numbers, drawn: Numbers) -> Numbers:
    """Return Pearson's correlation of each resample; values have shape (resamples, rows), or (1, rows) for all."""
    rows = drawn.sum(1, keepdims=True)
    means = [(drawn * of).sum(1, keepdims=True) / rows for of in (first, second)]
    centered = [of - mean for of, mean in zip((first, second), means, strict=True)]
    spreads = [np.sqrt((drawn * of**2).sum(1) / rows[:, 0]) for of in centered]
    constant = [spread <= _CONSTANT * np.abs(mean[:, 0]) for spread, mean in zip(spreads, means, strict=True)]
    covariance = (drawn * centered[0] * centered[1]).sum(1) / rows[:, 0]
    product = np.where(constant[0] | constant[1], 1.0, spreads[0] * spreads[1])
    correlation = np.clip(covariance / product, -1, 1)
    correlated: Numbers = np.where(constant[1], np.nan, np.where(constant[0], 0.0, correlation))
    return correlated


def _ranks(values: Numbers, drawn: Numbers) -> Numbers:
    """Return the rank of every row in each resample, shape (resamples, rows); equal values share their mean rank.

    A row that is drawn k times holds k places; rows that are not drawn have a rank that nothing reads.
    """
    unique, of_row = np.unique(values, return_inverse=True)
    order = np.argsort(of_row, kind="stable")
    starts = np.searchsorted(of_row[order], np.arange(len(unique)))
    places = np.add.reduceat(drawn[:, order], starts, axis=1)
    ranks: Numbers = (places.cumsum(1) - places + (places + 1) / 2)[:, of_row]
    return ranks
