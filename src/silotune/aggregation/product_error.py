"""Measure how far the product of the mean factors is from the mean of the silos' products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from silotune.aggregation.factor_pairs import deltas, factor_pairs, factors_of, is_thin, product_norm, stacked
from silotune.aggregation.update import Update
from silotune.core.tensors import Tensors

MOST_UPDATES = 64
"""Updates of a round beyond which the error of the mean of products is not computed."""

MOST_BYTES = 256 * 2**20
"""Bytes of A's and B's beyond which it is not computed."""


class ProductError:
    """Measures `‖mean(B_k·A_k) − B̄·Ā‖ / ‖mean(B_k·A_k)‖` of a round (Frobenius norm over all target modules).

    B̄·Ā is the aggregate's product, plus its addition to a delta. Averaging A and B separately causes the error;
    where all silos have the same A, or the same B, it is 0 up to rounding.

    Args:
        before: all shared tensors in the round's broadcast.
        by_rows: whether the mean weighs silos by their rows; else all alike.
        silos: how many silos may send an update; above `MOST_UPDATES` nothing is kept.
    """

    def __init__(self, before: Tensors, by_rows: bool, silos: int = 0) -> None:
        self._before = before
        self._by_rows = by_rows
        pairs = factor_pairs(before) if silos <= MOST_UPDATES else []
        self._pairs = [pair for pair in pairs if before[pair.a].dim() == 2]  # not of experts
        self._updates: list[tuple[float, Update]] = []
        self._bytes = 0

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Yield the updates, and keep their A's and B's, up to `MOST_UPDATES` and `MOST_BYTES`."""
        names = {name for pair in self._pairs for name in (pair.a, pair.b)}
        for update in updates:
            if self._pairs:
                factors = {name: tensor for name, tensor in update.tensors.items() if name in names}
                weight = float(update.rows) if self._by_rows else 1.0
                self._updates.append((weight, replace(update, tensors=factors)))
                self._bytes += sum(tensor.nbytes for tensor in factors.values())
                if len(self._updates) > MOST_UPDATES or self._bytes > MOST_BYTES:
                    self._pairs, self._updates = [], []
            yield update

    def of(self, aggregate: Tensors) -> float | None:
        """Return the error; None without pairs, if no factor was sent, with too many updates, or of a product of 0."""
        if not any(update.tensors for _, update in self._updates):
            return None
        total = sum(weight for weight, _ in self._updates)
        difference = size = 0.0
        by_module = deltas(aggregate)
        for pair in self._pairs:
            factors = [
                (weight / total, factors_of(pair, update.tensors, update.before(self._before)))
                for weight, update in self._updates
            ]
            left, right = stacked(factors)
            b, a = (aggregate.get(name, self._before[name]).double() for name in (pair.b, pair.a))
            delta = by_module.get(pair.module)
            if delta is None and is_thin(left, right):
                size += product_norm(left, right) ** 2
                difference += product_norm(torch.cat([left, -b], 1), torch.cat([right, a])) ** 2
                continue
            mean = left @ right
            size += float(torch.linalg.matrix_norm(mean)) ** 2
            mean -= b @ a
            if delta is not None:
                mean -= aggregate[delta].double() - self._before[delta].double()
            difference += float(torch.linalg.matrix_norm(mean)) ** 2
        return (difference / size) ** 0.5 if size else None
