"""Streaming means of updates: no update is kept. Sums run in float64, in silo-name order."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from silotune.communication.aggregation.update import Update
from silotune.core.tensors import Tensors


def weighted_mean(updates: Iterable[Update], weight: Callable[[Update], float]) -> Tensors:
    """Return `Σ w_k·θ_k / Σ w_k` over at least one update, in the updates' dtype."""
    total = 0.0
    sums: Tensors = {}
    dtypes: dict[str, torch.dtype] = {}
    for update in updates:
        share = weight(update)
        total += share
        for name, tensor in update.tensors.items():
            if name not in sums:
                sums[name], dtypes[name] = torch.zeros_like(tensor, dtype=torch.float64), tensor.dtype
            sums[name].add_(tensor, alpha=share)  # in float64, as the sum is
    return {name: (tensor / total).to(dtypes[name]) for name, tensor in sums.items()}


def uniform(updates: Iterable[Update]) -> Tensors:
    """Return `Σ θ_k / m` (FedMCP, Algorithm 1)."""
    return weighted_mean(updates, lambda _: 1.0)


def by_samples(updates: Iterable[Update]) -> Tensors:
    """Return `Σ n_k·θ_k / Σ n_k` (FedAvg; FedPrompt eq. 3)."""
    return weighted_mean(updates, lambda update: float(update.rows))
