"""How the coordinator combines updates. Sums run in float64 and in silo-name order: arrival order cannot matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from silotune.parts import Tensors


@dataclass(frozen=True)
class Update:
    """What one silo sent in one round: its shared tensors and the number of rows it trained on."""

    silo: str
    tensors: Tensors
    rows: int


Aggregation = Callable[[Sequence[Update]], Tensors]


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


AGGREGATIONS: dict[str, Aggregation] = {"uniform": uniform, "samples": by_samples}
