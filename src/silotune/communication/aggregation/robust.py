"""Aggregations that a few malicious silos cannot carry away. None of them weighs silos by their rows.

Every one gives the same bits for any order of the updates: they are put into silo-name order first, which also decides
ties. Where updates were refused and fewer are left than the options need, the most that those allow is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from silotune.communication.aggregation.mean import uniform
from silotune.communication.aggregation.update import Update
from silotune.core.numeric import ceil_fraction
from silotune.core.tensors import Tensors


def median(updates: Iterable[Update]) -> Tensors:
    """The coordinate-wise median (Yin et al. 2018, Definition 1); of an even number, the mean of the middle two."""
    ordered = _by_name(updates)
    return _between(ordered, (len(ordered) - 1) // 2)


def trimmed_mean(updates: Iterable[Update], trim: float) -> Tensors:
    """The coordinate-wise mean without the smallest and the largest values (Yin et al. 2018, Definition 2).

    Args:
        updates: one per silo.
        trim: the share of the updates that is cut at each end, rounded up.
    """
    ordered = _by_name(updates)
    return _between(ordered, min(ceil_fraction(trim, len(ordered)), (len(ordered) - 1) // 2))


def krum(updates: Iterable[Update], byzantine: int) -> Tensors:
    """The one update that is nearest to its `n − f − 2` nearest others (Blanchard et al. 2017, section 3)."""
    return uniform(_nearest(updates, byzantine, 1))


def multi_krum(updates: Iterable[Update], byzantine: int, keep: int | None = None) -> Tensors:
    """The uniform mean of the updates that Krum scores best (Blanchard et al. 2017, section 4).

    Args:
        updates: one per silo.
        byzantine: f, how many of them may be malicious.
        keep: m, how many are averaged, never more than n − f; None: so many.
    """
    return uniform(_nearest(updates, byzantine, keep))


def most_byzantine(count: int) -> int:
    """The most malicious silos that Krum allows for among `count`: it needs `n ≥ 2f + 3`."""
    return max((count - 3) // 2, 0)


def krum_scores(updates: Sequence[Update], byzantine: int) -> list[float]:
    """Per update the sum of the squared distances to its `n − f − 2` nearest others (at least one), in float64."""
    count = len(updates)
    near = max(count - byzantine - 2, 1)
    distances = [[0.0] * count for _ in updates]
    for one in range(count):
        for other in range(one):
            found = _squared_distance(updates[one].tensors, updates[other].tensors)
            distances[one][other] = distances[other][one] = found
    others = (sorted(row[:one] + row[one + 1 :]) for one, row in enumerate(distances))
    return [math.fsum(row[:near]) for row in others]


def _nearest(updates: Iterable[Update], byzantine: int, keep: int | None) -> list[Update]:
    """The updates with the best scores, in silo-name order; among equal scores the first names."""
    ordered = _by_name(updates)
    scores = krum_scores(ordered, min(byzantine, most_byzantine(len(ordered))))
    honest = max(len(ordered) - byzantine, 1)  # the malicious may be among those that arrived, all of them
    best = sorted(range(len(ordered)), key=lambda place: (scores[place], place))
    return [ordered[place] for place in sorted(best[: honest if keep is None else min(keep, honest)])]


def _squared_distance(one: Tensors, other: Tensors) -> float:
    return math.fsum(float((one[name].double() - other[name].double()).square().sum()) for name in sorted(one))


def _between(ordered: Sequence[Update], cut: int) -> Tensors:
    """Per coordinate the mean of the values left when `cut` are dropped at each end."""
    result: Tensors = {}
    for name, first in ordered[0].tensors.items():
        kept = _sorted([update.tensors[name] for update in ordered])[cut : len(ordered) - cut]
        result[name] = kept.double().mean(0).to(first.dtype)
    return result


def _sorted(values: Sequence[Tensor]) -> Tensor:
    """Shape (updates, …), the values of every coordinate from the smallest to the largest."""
    return torch.stack(list(values)).sort(dim=0, stable=True).values


def _by_name(updates: Iterable[Update]) -> list[Update]:
    return sorted(updates, key=lambda update: update.silo)
