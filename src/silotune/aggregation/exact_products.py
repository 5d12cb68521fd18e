"""`FedExLoRA`, `FLoRA`, `LoRAFAIR`: aggregations that make up for the error of averaging A and B."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from typing_extensions import override

from silotune.aggregation.broadcast_aggregation import BroadcastAggregation, RankAggregation
from silotune.aggregation.factor_pairs import (
    deltas,
    factor_pairs,
    factors_of,
    stacked,
    without_factors,
)
from silotune.aggregation.mean import by_samples
from silotune.aggregation.update import Update
from silotune.core.tensors import Tensors


class FedExLoRA(BroadcastAggregation):
    """The means of A and of B, and in the delta `mean(B_k·A_k) − B̄·Ā`, which they lack (Singhal et al. 2024).

    Means are by the silos' rows. With it the effective weights are the mean of the silos', up to the rounding of the
    delta.
    """

    name = "fedex-lora"
    needs_pairs = needs_delta = adopted_whole = True

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """No update is kept."""
        products = _MeanProducts(before)
        tensors = by_samples(products.watch(updates))
        for pair in factor_pairs(before):
            b, a = tensors[pair.b].double(), tensors[pair.a].double()  # as they come down, rounded
            tensors |= products.added(pair.module, -(b @ a))
        return tensors


class FLoRA(RankAggregation):
    """In the delta `mean(B_k·A_k)`: the silos' factors stacked, then merged; B becomes zero (Wang et al. 2024).

    Means are by the silos' rows. The silos' ranks may differ.
    """

    name = "flora"
    needs_delta = adopted_whole = True

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """No update is kept."""
        products, pairs = _MeanProducts(before), factor_pairs(before)
        tensors = by_samples(without_factors(products.watch(updates), pairs))
        for pair in pairs:
            tensors |= {pair.a: before[pair.a], pair.b: torch.zeros_like(before[pair.b])}
            tensors |= products.added(pair.module)
        return tensors


class LoRAFAIR(BroadcastAggregation):
    """The means of A and of B, and B̄ corrected toward the mean product (Bian et al. 2024).

    `ΔB = argmin ‖mean(B_k·A_k) − (B̄ + ΔB)·Ā‖² + λ·‖ΔB‖²` in the Frobenius norm, solved exactly:
    `ΔB = (mean(B_k·A_k) − B̄·Ā)·Āᵀ·(Ā·Āᵀ + λ·I)⁻¹`. Means are by the silos' rows.

    Args:
        regularization: λ. At 0 the least ΔB of those that come nearest to the mean product.
    """

    name = "lora-fair"
    needs_pairs = True

    def __init__(self, regularization: float) -> None:
        self._regularization = regularization

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """All updates are kept until the last one is there."""
        all_updates = list(updates)
        tensors = by_samples(all_updates)
        rows = sum(update.rows for update in all_updates)
        for pair in factor_pairs(before):
            weighted = [(update.rows / rows, factors_of(pair, update, before)) for update in all_updates]
            b, a = tensors[pair.b].double(), tensors[pair.a].double()
            left, right = stacked([*weighted, (-1.0, (b, a))])  # of what B̄·Ā lacks
            damped = a @ a.T + self._regularization * torch.eye(len(a), dtype=a.dtype)
            correction = left @ (right @ a.T) @ torch.linalg.pinv(damped, hermitian=True)
            tensors[pair.b] = (b + correction).to(before[pair.b].dtype)
        return tensors


class _MeanProducts:
    """Adds up `n_k·B_k·A_k` of every target module, while updates pass.

    Args:
        before: all shared tensors in the round's broadcast.
    """

    def __init__(self, before: Tensors) -> None:
        self._before = before
        self._pairs = factor_pairs(before)
        self._deltas = deltas(before)
        self._sums = {pair.module: torch.zeros(()) for pair in self._pairs}
        self._rows = 0

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Yield the updates."""
        for update in updates:
            self._rows += update.rows
            for pair in self._pairs:
                b, a = factors_of(pair, update, self._before)
                self._sums[pair.module] = self._sums[pair.module] + update.rows * (b @ a)
            yield update

    def added(self, module: str, lacking: Tensor | float = 0.0) -> Tensors:
        """Return a module's delta, by name, with the mean product and another change of weights added."""
        name = self._deltas[module]
        delta = self._before[name]
        return {name: (delta.double() + self._sums[module] / self._rows + lacking).to(delta.dtype)}
