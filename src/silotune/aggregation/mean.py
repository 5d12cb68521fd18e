"""Means of updates. Sums run in float64 and in the order given; the coordinator gives silo-name order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from silotune.aggregation.update import Update
from silotune.parts import Tensors


def weighted_mean(updates: Sequence[Update], weights: Sequence[float]) -> Tensors:
    """`Σ w_k·θ_k / Σ w_k`, in the updates' dtype."""
    total = float(sum(weights))
    result: Tensors = {}
    for name, first in updates[0].tensors.items():
        mean = torch.zeros_like(first, dtype=torch.float64)
        for update, weight in zip(updates, weights, strict=True):
            mean += (weight / total) * update.tensors[name].double()
        result[name] = mean.to(first.dtype)
    return result


def uniform(updates: Sequence[Update]) -> Tensors:
    """`Σ θ_k / m` (FedMCP, Algorithm 1)."""
    return weighted_mean(updates, [1.0] * len(updates))


def by_samples(updates: Sequence[Update]) -> Tensors:
    """`Σ n_k·θ_k / Σ n_k` (FedAvg; FedPrompt eq. 3)."""
    return weighted_mean(updates, [float(update.rows) for update in updates])
