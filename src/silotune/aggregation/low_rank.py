"""Aggregations of LoRA's pairs A and B whose result has LoRA's rank: `FlexLoRA`, `HetLoRA`, `FedSVD`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from typing_extensions import override

from silotune.aggregation.broadcast_aggregation import BroadcastAggregation, RankAggregation
from silotune.aggregation.factor_pairs import (
    cut_to_rank,
    factor_pairs,
    factors_of,
    product_norm,
    stacked,
    without_factors,
)
from silotune.aggregation.mean import by_samples
from silotune.aggregation.update import Update
from silotune.core.tensors import Tensors


class FlexLoRA(RankAggregation):
    """The best approximation of `Σ n_k·B_k·A_k / Σ n_k` of LoRA's rank (Bai et al. 2024).

    By a singular value decomposition `U·Σ·Vᵀ`, cut after r values: B becomes `U·Σ` and A `Vᵀ`. All other tensors are
    averaged by the silos' rows. The mean product itself is never in memory. A silo of a smaller rank gets the best
    approximation of that rank.
    """

    name = "flexlora"
    adopted_whole = True  # between the old and the new factors lies no mean of their products
    changes_add_up = False  # the SVD turns the columns of B and the rows of A
    turns_factors = True

    @override
    def to_rank(self, shared: Tensors, rank: int) -> Tensors:
        """By an SVD of B·A; where B is zero, the first rows of A as they were drawn."""
        tensors = dict(shared)
        for pair in factor_pairs(shared):
            a, b = shared[pair.a], shared[pair.b]
            if b.any():
                new_b, new_a = truncated(b.double(), a.double(), rank)
                tensors[pair.a], tensors[pair.b] = new_a.to(a.dtype), new_b.to(b.dtype)
            else:
                tensors |= cut_to_rank(pair, a, b, rank)
        return tensors

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """All updates are kept until the last one is there."""
        all_updates, pairs = list(updates), factor_pairs(before)
        tensors = by_samples(without_factors(all_updates, pairs))
        rows = sum(update.rows for update in all_updates)
        for pair in pairs:
            weighted = [(update.rows / rows, factors_of(pair, update, before)) for update in all_updates]
            b, a = truncated(*stacked(weighted), rank=len(before[pair.a]))
            tensors[pair.a], tensors[pair.b] = a.to(before[pair.a].dtype), b.to(before[pair.b].dtype)
        return tensors


class HetLoRA(RankAggregation):
    """Means of A and of B padded with zeros to rank r, weighted by `‖B_k·A_k‖` per target module (Cho et al. 2024).

    All other tensors are averaged by the silos' rows; so are A and B where all products are zero. A factor that the
    round did not train (RoLoRA) stays as it is.
    """

    name = "hetlora"

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """All updates are kept until the last one is there."""
        all_updates, pairs = list(updates), factor_pairs(before)
        tensors = by_samples(without_factors(all_updates, pairs))
        for pair in pairs:
            factors = [factors_of(pair, update, before) for update in all_updates]
            norms = [product_norm(b, a) for b, a in factors]
            if not any(norms):
                norms = [float(update.rows) for update in all_updates]
            mean_a, mean_b = (torch.zeros_like(before[name], dtype=torch.float64) for name in (pair.a, pair.b))
            for norm, (b, a) in zip(norms, factors, strict=True):
                mean_a[: len(a)] += norm / sum(norms) * a
                mean_b[:, : b.shape[1]] += norm / sum(norms) * b
            means = {pair.a: mean_a, pair.b: mean_b}
            sent = means.keys() & all_updates[0].tensors.keys()
            tensors |= {name: means[name].to(before[name].dtype) for name in sorted(sent)}
        return tensors


class FedSVD(BroadcastAggregation):
    """The mean of B, then both factors anew from `mean(B)·A = U·Σ·Vᵀ`: B becomes `U·Σ`, A the orthonormal `Vᵀ`.

    Lee et al. 2025. Silos train B alone; the product stays the same, up to rounding.
    """

    name = "fedsvd"
    needs_pairs = adopted_whole = True
    changes_add_up = False  # a change of B belongs to the A of its round
    turns_factors = True

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        tensors = by_samples(updates)
        for pair in factor_pairs(before):
            a, b = (tensors.get(name, before[name]) for name in (pair.a, pair.b))
            new_b, new_a = truncated(b.double(), a.double(), rank=len(a))
            tensors[pair.a], tensors[pair.b] = new_a.to(a.dtype), new_b.to(b.dtype)
        return tensors


def truncated(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return `(U·Σ, Vᵀ)` of the `rank` largest singular values of `left·right`; a row of Vᵀ has its largest entry > 0.

    Args:
        left: shape (out, k), float64.
        right: shape (k, in), float64; the product is not computed.
        rank: what is above k is filled with zeros.

    Returns:
        Shapes (out, rank) and (rank, in).
    """
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, values, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    b, a = (q_left @ u * values)[:, :rank], (vh @ q_right.T)[:rank]
    if (missing := rank - len(a)) > 0:  # a rank above the module's widths
        b, a = torch.nn.functional.pad(b, (0, missing)), torch.nn.functional.pad(a, (0, 0, 0, missing))
    largest = a.gather(1, a.abs().argmax(1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(a)
    return b * signs.T, a * signs
