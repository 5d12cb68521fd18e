"""Aggregations that tolerate malicious silos: median, trimmed mean, Krum and Multi-Krum, all unweighted.

Updates are sorted by silo name first, so the bits do not depend on the order of arrival; the order of names also breaks
ties. If refused updates leave too few for `trim` or `byzantine`, the largest value that they still allow is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from silotune.aggregation.mean import uniform
from silotune.aggregation.update import Update
from silotune.core.numeric import ceil_fraction
from silotune.core.tensors import Tensors


def median(updates: Iterable[Update]) -> Tensors:
    """Return the median by coordinate (Yin et al. 2018, Definition 1); of an even count the mean of the middle two."""
    ordered = _by_name(updates)
    return _trimmed_mean_of(ordered, (len(ordered) - 1) // 2)


def trimmed_mean(updates: Iterable[Update], trim: float) -> Tensors:
    """Return the coordinate-wise trimmed mean (Yin et al. 2018, Definition 2).

    Args:
        updates: one per silo.
        trim: the fraction of the updates that is cut at each end, rounded up.
    """
    ordered = _by_name(updates)
    return _trimmed_mean_of(ordered, min(ceil_fraction(trim, len(ordered)), (len(ordered) - 1) // 2))


def krum(updates: Iterable[Update], byzantine: int) -> Tensors:
    """Return the update of the best Krum score, with f = `byzantine` (Blanchard et al. 2017, section 3)."""
    return uniform(_best_by_krum(updates, byzantine, 1))


def multi_krum(updates: Iterable[Update], byzantine: int, keep: int | None = None) -> Tensors:
    """Return the uniform mean of the updates of the best Krum scores (Blanchard et al. 2017, section 4).

    Args:
        updates: one per silo.
        byzantine: f, the number of updates that may be malicious.
        keep: m, the number of updates to average, n − f at most; by default n − f.
    """
    return uniform(_best_by_krum(updates, byzantine, keep))


def most_byzantine(count: int) -> int:
    """Return the largest f that Krum tolerates among n = `count` updates: it needs `n ≥ 2f + 3`."""
    return max((count - 3) // 2, 0)


def krum_scores(updates: Sequence[Update], byzantine: int) -> list[float]:
    """Return per update the sum of squared distances to its `n − f − 2` nearest others (at least one), in float64."""
    count = len(updates)
    near = max(count - byzantine - 2, 1)
    distances = [[0.0] * count for _ in updates]
    for i in range(count):
        for j in range(i):
            x, y = updates[i].tensors, updates[j].tensors
            squares = (float((x[name].double() - y[name].double()).square().sum()) for name in sorted(x))
            distances[i][j] = distances[j][i] = math.fsum(squares)
    to_others = (sorted(row[:i] + row[i + 1 :]) for i, row in enumerate(distances))
    return [math.fsum(row[:near]) for row in to_others]


def _best_by_krum(updates: Iterable[Update], byzantine: int, keep: int | None) -> list[Update]:
    """Return the updates with the lowest Krum scores, in silo-name order; of equal scores, the first names."""
    ordered = _by_name(updates)
    scores = krum_scores(ordered, min(byzantine, most_byzantine(len(ordered))))
    honest = max(len(ordered) - byzantine, 1)  # all malicious updates may be among those that arrived
    best = sorted(range(len(ordered)), key=lambda index: (scores[index], index))
    return [ordered[index] for index in sorted(best[: honest if keep is None else min(keep, honest)])]


def _trimmed_mean_of(ordered: Sequence[Update], cut: int) -> Tensors:
    """Return per coordinate the mean of the values without the `cut` smallest and largest."""
    result: Tensors = {}
    for name, first in ordered[0].tensors.items():
        values = _sorted([update.tensors[name] for update in ordered])[cut : len(ordered) - cut]
        result[name] = values.double().mean(0).to(first.dtype)
    return result


def _sorted(values: Sequence[Tensor]) -> Tensor:
    """Sort the values of every coordinate; returns shape (updates, …)."""
    return torch.stack(list(values)).sort(dim=0, stable=True).values


def _by_name(updates: Iterable[Update]) -> list[Update]:
    return sorted(updates, key=lambda update: update.silo)
