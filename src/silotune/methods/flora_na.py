"""FLoRA-NA (Nguyen et al. 2025): the coordinator mixes silos' factors so that their product is near the mean one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from typing_extensions import override

from silotune.aggregation import BroadcastAggregation, Update
from silotune.aggregation.factor_pairs import stacked, with_new_factors
from silotune.methods import GLOBAL, Scope, Tensors
from silotune.methods.supervised import Supervised

SWEEPS = 10
"""Times that the coefficients of A and then of B are computed; silotune's choice."""

DAMPING = 1e-8
"""Holds back coefficients that nothing determines, as those of equal silos; in units of the system's mean diagonal."""


class MixedFactors(BroadcastAggregation):
    """Row j of A becomes `Σ_k p_kj·A_k[j]`, column j of B `Σ_k q_kj·B_k[:, j]`, to approximate `Σ n_k·B_k·A_k / Σ n_k`.

    p and q minimize the distance in the Frobenius norm by alternating least squares from the plain means, in systems
    of one unknown for each silo and rank. The paper's solver and what its coefficients stand for could not be read:
    one for each silo and rank, and least squares, are silotune's choice. Coefficients for all pairs of rows would give
    FlexLoRA's product.
    """

    name = "flora-na"
    needs_pairs = True

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """Aggregate when the last update has arrived; all are kept until then."""
        return with_new_factors(updates, before, lambda weighted, rank: mixed(weighted))


def mixed(weighted: list[tuple[float, tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
    """Return B (out, r) and A (r, in), mixed from silos' w_k and (B_k, A_k) of one rank, so that B·A ≈ `Σ w_k·B_k·A_k`.

    Everything is computed from the inner products of rows of A_k and of columns of B_k: with n silos two matrices of
    shape (n·r, n·r).
    """
    left, right = stacked([(1.0, pair) for _, pair in weighted])
    rank, silos, weights = left.shape[1] // len(weighted), len(weighted), [weight for weight, _ in weighted]
    ups, downs = left.mT @ left, right @ right.mT
    means = torch.tensor(weights, dtype=left.dtype).repeat_interleave(rank)
    p, q = means, means
    for _ in range(SWEEPS):
        p = _solved(p, downs, ups, means, _spread(q, rank), silos)
        q = _solved(q, ups, downs, means, _spread(p, rank), silos)
    return left @ _spread(q, rank), _spread(p, rank).mT @ right


def _spread(coefficients: Tensor, rank: int) -> Tensor:
    """Return a matrix (n·r, r) that mixes each rank's rows over the silos, from coefficients (n·r,), silo by silo."""
    ranks = torch.eye(rank, dtype=coefficients.dtype)
    return coefficients.unsqueeze(1) * ranks.repeat(len(coefficients) // rank, 1)


def _solved(now: Tensor, own: Tensor, others: Tensor, means: Tensor, other: Tensor, silos: int) -> Tensor:
    """Return one factor's coefficients that fit best to the other factor's, by the normal equations.

    Args:
        now: the coefficients before, from which the damped solution departs as little as possible.
        own: inner products of this factor's rows.
        others: those of the other factor's.
        means: n_k / Σ n, once for each rank.
        other: the other factor's coefficients, as `_spread` returns them.
        silos: n.
    """
    rank = other.shape[1]
    system = own * (other.mT @ others @ other).repeat(silos, silos)
    target = (other.mT @ others * means @ own).reshape(rank, silos, rank).diagonal(dim1=0, dim2=2).flatten()
    smallest = torch.finfo(system.dtype).tiny  # where B is 0, so is the system
    damped = system + (DAMPING * system.diagonal().mean() + smallest) * torch.eye(len(system), dtype=system.dtype)
    missing = (target - system @ now).unsqueeze(1)
    return now + torch.cholesky_solve(missing, torch.linalg.cholesky(damped)).squeeze(1)


class FLoRANA(Supervised):
    """FedAvg of one LoRA by `MixedFactors`, at the bytes of the plain means."""

    name = "flora-na"
    paper = "Nguyen et al. 2025, FLoRA-NA: Nearly Accurate Aggregation for Federated Low-Rank Adaptation"
    defaults = {"tuner": "lora", "aggregation": "flora-na"}
    tuners = ("lora",)
    aggregations = ("flora-na",)
    scope = Scope.SHARED
    adapter_name = GLOBAL
