"""Weighted means of updates in float64, which hold one update at a time.

Float sums depend on the order, so the updates must come in silo-name order: `runs/engines/base.py` passes them through
`in_name_order` (`aggregation/update.py`), which holds back those that arrive early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from silotune.aggregation.update import Update
from silotune.core.tensors import Tensors


def weighted_mean(updates: Iterable[Update], weight: Callable[[Update], float]) -> Tensors:
    """Return `Σ w_k·θ_k / Σ w_k`.

    Args:
        updates: at least one, in silo-name order; an iterator is consumed one by one.
        weight: returns w_k, which need not be normalized.

    Returns:
        The mean by "part/tensor" name, in the updates' dtype.
    """
    total = 0.0
    sums: Tensors = {}
    dtypes: dict[str, torch.dtype] = {}
    for update in updates:
        update_weight = weight(update)
        total += update_weight
        if not sums:
            sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in update.tensors.items()}
            dtypes = {name: tensor.dtype for name, tensor in update.tensors.items()}
        if sums:
            torch._foreach_add_(list(sums.values()), [update.tensors[name] for name in sums], alpha=update_weight)
    return {name: (tensor / total).to(dtypes[name]) for name, tensor in sums.items()}


def uniform(updates: Iterable[Update]) -> Tensors:
    """Return `Σ θ_k / m` (FedMCP, Algorithm 1)."""
    return weighted_mean(updates, lambda _: 1.0)


def by_samples(updates: Iterable[Update]) -> Tensors:
    """Return `Σ n_k·θ_k / Σ n_k` (FedAvg; FedPrompt eq. 3)."""
    return weighted_mean(updates, lambda update: float(update.rows))
