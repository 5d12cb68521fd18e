"""FedMomentum (Yan et al. 2026): LoRA becomes the largest components of the mean product, a delta takes the others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from silotune.aggregation import BroadcastAggregation, Update, by_samples
from silotune.aggregation.factor_pairs import deltas, factor_pairs, stacked, weighted_factors, without_factors
from silotune.config.section import Options
from silotune.methods import Tensors
from silotune.methods.lora_products import DeltaLoRA, truncated


class BalancedSVDOptions(Options):
    """The keys of `aggregation=fedmomentum`."""

    energy: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="τ of FedMomentum, the share of the mean product's squares that LoRA and delta keep; 1: all",
    )


class BalancedSVD(BroadcastAggregation):
    """With `Σ n_k·B_k·A_k / Σ n_k = U·S·Vᵀ`: B becomes `U_r·√S_r`, A `√S_r·V_rᵀ`, and the rest is added to the delta.

    Of the rest, the delta gets the components up to a share τ of the energy `Σ s²`. The paper has a randomized SVD,
    this one is exact. That τ is a share of squares, and 1 unless set, is silotune's choice: then nothing is lost, and
    the effective weights are the mean of the silos', as with FedEx-LoRA.
    """

    name = "fedmomentum"
    Options = BalancedSVDOptions
    needs_pairs = needs_delta = adopted_whole = True
    changes_add_up = False  # the SVD turns the columns of B and the rows of A
    turns_factors = True

    def __init__(self, options: BalancedSVDOptions) -> None:
        self._energy = options.energy

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """Aggregate when the last update has arrived; all are kept until then."""
        all_updates, pairs, of_module = list(updates), factor_pairs(before), deltas(before)
        tensors = by_samples(without_factors(all_updates, pairs))
        for pair in pairs:
            left, right = stacked(weighted_factors(pair, all_updates, before))
            if not left.any():  # LoRA as it began; an SVD of 0 would make A zero, too, and B·A without gradient
                continue
            rank, delta = len(before[pair.a]), before[of_module[pair.module]]
            b, a = truncated(left, right, max(rank, len(right)))  # B holds the singular values
            sizes = b.norm(dim=0)
            roots, limits = sizes[:rank].sqrt(), torch.finfo(b.dtype)
            least = max(float(limits.eps * sizes[0]) ** 0.5, limits.tiny)  # a mean of lower rank: values near 0
            new_b = (b[:, :rank] / roots.clamp(min=least)).to(delta.dtype)
            new_a = (roots.unsqueeze(1) * a[:rank]).to(delta.dtype)
            count = max(rank, components(sizes, self._energy))
            rest = b[:, :count] @ a[:count] - new_b.double() @ new_a.double()  # as they come down, rounded
            tensors |= {pair.a: new_a, pair.b: new_b, of_module[pair.module]: (delta.double() + rest).to(delta.dtype)}
        return tensors


def components(sizes: Tensor, energy: float) -> int:
    """Return how many of the singular values, largest first, make up a share of the sum of their squares."""
    shares = sizes.square().cumsum(0)
    return int((shares < energy * shares[-1]).sum()) + 1


class FedMomentum(DeltaLoRA):
    """One LoRA that goes on from the main directions of the silos' mean update, by `BalancedSVD`."""

    name = "fedmomentum"
    paper = "Yan et al. 2026, FedMomentum: Preserving LoRA Training Momentum in Federated Fine-Tuning"
    defaults = {"tuner": "lora", "aggregation": "fedmomentum"}
    aggregations = ("fedmomentum",)
