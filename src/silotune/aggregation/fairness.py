"""Aggregations that give silos with larger losses more weight: q-FedAvg, and agnostic federated learning (AFL).

Both read `F_k(w)`, the loss of the received model w over all of a silo's training rows, as their papers do: the silo
measures it before it trains, by its method's own loss, without dropout, and it leaves as the number `received_loss`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from silotune.aggregation.broadcast_aggregation import RECEIVED_LOSS, BroadcastAggregation
from silotune.aggregation.mean import weighted_mean
from silotune.aggregation.update import Update
from silotune.config.section import Options
from silotune.core.tensors import Tensors, iter_change

_LEAST_LOSS = 1e-10
"""Added to losses, as in the authors' code, so that `F^(q−1)` is finite."""


class QFedAvgOptions(Options):
    """The keys of `aggregation=q-fedavg`."""

    q: float = Field(default=1.0, ge=0, description="q of q-FedAvg: 0 is FedAvg, larger values favor large losses.")
    lipschitz: float = Field(
        default=0.01,
        gt=0,
        description="L of q-FedAvg, which shortens the step; 1/η in the paper, where η is the rate of local SGD.",
    )


class QFedAvg(BroadcastAggregation):
    """q-FedAvg (Li et al. 2020, "Fair Resource Allocation in Federated Learning", Algorithm 2).

    With the change `d_k = w_k − w`, w becomes `w + Σ n_k·F_k^q·d_k / Σ n_k·(F_k^q + q·F_k^(q−1)·L·‖d_k‖²)`: the
    paper's Δ_k and h_k divided by L. The paper draws silos by their rows; here they are weighted by them, so that
    q = 0 is FedAvg. L does not follow the local rate, because steps of Adam are no multiples of gradients: with L = 1 a
    LoRA that silos train by Adam hardly moves, as `‖d_k‖²` is large.
    """

    name = "q-fedavg"
    Options = QFedAvgOptions
    reads = RECEIVED_LOSS

    def __init__(self, options: QFedAvgOptions) -> None:
        self._q, self._lipschitz = options.q, options.lipschitz

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """Aggregate the updates one by one, without keeping any."""
        sums: Tensors = {}
        total = 0.0
        for update in updates:
            assert update.score is not None, "without it the update is refused"
            loss, square = update.score + _LEAST_LOSS, 0.0
            weight = update.rows * loss**self._q
            for name, change in iter_change(update.before(before), update.tensors):
                square += float(change.square().sum())
                sums[name] = sums.get(name, torch.zeros_like(change)) + weight * change
            total += weight * (1 + self._q / loss * self._lipschitz * square)
        return {name: (before[name].double() + sum_ / total).to(before[name].dtype) for name, sum_ in sums.items()}


class AgnosticOptions(Options):
    """The keys of `aggregation=afl`."""

    mixture_lr: float = Field(
        default=0.1, gt=0, description="γ_λ of AFL, the rate at which the weights of silos follow their losses."
    )


class AgnosticMean(BroadcastAggregation):
    """Agnostic federated learning (Mohri et al. 2019, Algorithm 1): the model for the worst mixture of silos.

    w becomes `Σ λ_k·w_k / Σ λ_k` over the round's silos, and λ the point of the simplex nearest to `λ + γ_λ·F(w)`. The
    paper takes one stochastic step a round, here w_k is trained as the run says. λ starts uniform; a silo that comes
    later starts with the mean weight. Of a silo that was not sampled no loss is known, and counts as 0.
    """

    name = "afl"
    Options = AgnosticOptions
    reads = RECEIVED_LOSS

    def __init__(self, options: AgnosticOptions) -> None:
        self._lr = options.mixture_lr

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """Aggregate when the last update has arrived; all are kept until then."""
        all_updates = list(updates)
        losses = {update.silo: update.score or 0.0 for update in all_updates}
        weights = {name: float(weight) for name, weight in self.state.items()}
        weights |= dict.fromkeys(losses.keys() - weights.keys(), 1 / (len(weights) or len(losses)))
        total, names = sum(weights.values()), sorted(weights)
        if any(weights[silo] for silo in losses):
            tensors = weighted_mean(all_updates, lambda update: weights[update.silo])
        else:  # of this round's silos alone nothing is learned
            tensors = {}
        raised = [weights[name] / total + self._lr * losses.get(name, 0.0) for name in names]
        self.state = dict(zip(names, on_simplex(torch.tensor(raised, dtype=torch.float64)), strict=True))
        self.report = {"weights": {name: float(weight) for name, weight in self.state.items()}}
        return tensors


def on_simplex(point: Tensor) -> Tensor:
    """Return the point nearest to this one whose numbers are at least 0 and add up to 1 (Duchi et al. 2008, figure 1).

    Args:
        point: shape (n,).
    """
    largest = point.sort(descending=True).values
    excess = (largest.cumsum(0) - 1) / torch.arange(1, len(point) + 1, dtype=point.dtype)
    return (point - excess[largest > excess][-1]).clamp(min=0)
