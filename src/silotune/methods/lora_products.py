"""Methods whose coordinator reads silos' products `B_k·A_k`: FlexLoRA, FedSVD, FedEx-LoRA, FLoRA, LoRA-FAIR.

Separate means of A and of B miss the mean of the products. Each aggregation is defined before its method; any
method that shares both factors may choose one by `aggregation=`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from silotune.aggregation import BroadcastAggregation, RankAggregation, Update, by_samples
from silotune.aggregation.factor_pairs import (
    cut_to_rank,
    deltas,
    factor_pairs,
    factors_of,
    stacked,
    weighted_factors,
    with_new_factors,
    without_factors,
)
from silotune.methods import GLOBAL, HEAD, OneModel, Part, Phase, Scope, Supervised, Tensors, shared
from silotune.methods.lora_factors import B, SplitLoRA
from silotune.models.tuners import Delta

DELTA = "delta"


class ProductSVD(RankAggregation):
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
        """Cut the factors to a rank by an SVD of B·A; while B is zero, take the first rows of A."""
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
        """Aggregate when the last update has arrived; all are kept until then."""
        return with_new_factors(updates, before, lambda factors, rank: truncated(*stacked(factors), rank=rank))


class FlexLoRA(Supervised):
    """Trains one LoRA in all silos and averages the products `B·A` by `ProductSVD`; each silo may have its own rank."""

    name = "flexlora"
    paper = "Bai et al. 2024, Federated Fine-tuning of LLMs under Heterogeneous Tasks and Client Resources"
    defaults = {"tuner": "lora", "aggregation": "flexlora"}
    tuners = ("lora",)
    aggregations = ("flexlora",)
    scope = Scope.SHARED
    adapter_name = GLOBAL


class FactorSVD(BroadcastAggregation):
    """Averages B, then computes new factors from `mean(B)·A = U·Σ·Vᵀ`: B becomes `U·Σ`, A the orthonormal `Vᵀ`.

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
            b, a = truncated(*factors_of(pair, tensors, before), rank=len(before[pair.a]))
            tensors[pair.a], tensors[pair.b] = a.to(before[pair.a].dtype), b.to(before[pair.b].dtype)
        return tensors


class FedSVD(SplitLoRA):
    """B alone is trained and sent, and aggregated by `FactorSVD`."""

    name = "fedsvd"
    paper = "Lee et al. 2025, FedSVD: Adaptive Orthogonalization for Private Federated Learning with LoRA"
    defaults = {"tuner": "lora", "aggregation": "fedsvd"}
    a = Scope.SHARED
    b = Scope.SHARED

    def phases(self) -> list[Phase]:
        """B and the head; A is as the coordinator made it."""
        return [Phase("train", trains=(B, HEAD), views={"full": self.mix}, loss=self.loss)]


class DeltaLoRA(OneModel):
    """One shared LoRA over weights with a delta, trained on cross-entropy; silos receive the delta and never send it.

    Subclasses bring the aggregation that computes the delta, and may redraw the LoRA after every round (`redrawn`).
    """

    tuners = ("lora",)
    redrawn: ClassVar[bool] = False
    mix = {GLOBAL: 1, DELTA: 1}

    @override
    def parts(self) -> dict[str, Part]:
        tuner = self.setting.tuner
        return {GLOBAL: shared(tuner, self.redrawn), DELTA: shared(Delta(tuner)), HEAD: self.head()}

    def phases(self) -> list[Phase]:
        """One phase that trains LoRA and head."""
        return [Phase("train", trains=(GLOBAL, HEAD), views={"full": self.mix}, loss=self.loss)]


class MeansAndResidual(BroadcastAggregation):
    """The means of A and of B, and in the delta `mean(B_k·A_k) − B̄·Ā`, which they lack (Singhal et al. 2024).

    Means are by the silos' rows. With it the effective weights are the mean of the silos', up to the rounding of the
    delta.
    """

    name = "fedex-lora"
    needs_pairs = needs_delta = adopted_whole = True

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """Aggregate the updates one by one, without keeping any."""
        products = _MeanProducts(before)
        tensors = by_samples(products.watch(updates))
        for pair in factor_pairs(before):
            b, a = factors_of(pair, tensors, before)  # as they come down, rounded
            tensors |= products.added(pair.module, -(b @ a))
        return tensors


class FedExLoRA(DeltaLoRA):
    """The delta holds the residuals of all rounds, which `MeansAndResidual` makes."""

    name = "fedex-lora"
    paper = "Singhal et al. 2024, Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation Models"
    defaults = {"tuner": "lora", "aggregation": "fedex-lora"}
    aggregations = ("fedex-lora",)


class StackedProducts(RankAggregation):
    """Stacks the silos' factors, adds `mean(B_k·A_k)` to the delta, and sets B to zero (Wang et al. 2024).

    Means are by the silos' rows. The silos' ranks may differ.
    """

    name = "flora"
    needs_delta = adopted_whole = True

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """Aggregate the updates one by one, without keeping any."""
        products, pairs = _MeanProducts(before), factor_pairs(before)
        tensors = by_samples(without_factors(products.watch(updates), pairs))
        for pair in pairs:
            tensors |= {pair.a: before[pair.a], pair.b: torch.zeros_like(before[pair.b])}
            tensors |= products.added(pair.module)
        return tensors


class FLoRA(DeltaLoRA):
    """The delta holds the products of all rounds, which `StackedProducts` adds up; every round starts a new LoRA."""

    name = "flora"
    paper = "Wang et al. 2024, FLoRA: Federated Fine-Tuning LLMs with Heterogeneous Low-Rank Adaptations"
    defaults = {"tuner": "lora", "aggregation": "flora"}
    aggregations = ("flora",)
    redrawn = True


class CorrectedMeans(BroadcastAggregation):
    """The means of A and of B, and B̄ corrected toward the mean product (Bian et al. 2024).

    `ΔB = argmin ‖mean(B_k·A_k) − (B̄ + ΔB)·Ā‖² + λ·‖ΔB‖²` in the Frobenius norm, solved exactly:
    `ΔB = (mean(B_k·A_k) − B̄·Ā)·Āᵀ·(Ā·Āᵀ + λ·I)⁻¹`. Means are by the silos' rows.

    Args:
        regularization: λ. At 0 the smallest ΔB that gives the product nearest to the mean product.
    """

    name = "lora-fair"
    needs_pairs = True

    def __init__(self, regularization: float) -> None:
        self._regularization = regularization

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """Aggregate when the last update has arrived; all are kept until then."""
        all_updates = list(updates)
        tensors = by_samples(all_updates)
        for pair in factor_pairs(before):
            b, a = factors_of(pair, tensors, before)
            left, right = stacked([*weighted_factors(pair, all_updates, before), (-1.0, (b, a))])  # of what B̄·Ā lacks
            damped = a @ a.T + self._regularization * torch.eye(len(a), dtype=a.dtype)
            correction = left @ (right @ a.T) @ torch.linalg.pinv(damped, hermitian=True)
            tensors[pair.b] = (b + correction).to(before[pair.b].dtype)
        return tensors


class LoRAFAIR(Supervised):
    """FedAvg of one LoRA by `CorrectedMeans`; silos start from Ā and B̄ + ΔB."""

    name = "lora-fair"
    paper = "Bian et al. 2024, LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement"
    defaults = {"tuner": "lora", "aggregation": "lora-fair"}
    tuners = ("lora",)
    aggregations = ("lora-fair",)
    scope = Scope.SHARED
    adapter_name = GLOBAL


class _MeanProducts:
    """Adds up `n_k·B_k·A_k` of every target module, while updates pass."""

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
                b, a = factors_of(pair, update.tensors, update.before(self._before))
                self._sums[pair.module] = self._sums[pair.module] + update.rows * (b @ a)
            yield update

    def added(self, module: str, lacking: Tensor | float = 0.0) -> Tensors:
        """Return a module's delta, by name, with the mean product and another change of weights added."""
        name = self._deltas[module]
        delta = self._before[name]
        return {name: (delta.double() + self._sums[module] / self._rows + lacking).to(delta.dtype)}


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
