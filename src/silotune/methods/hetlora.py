"""HetLoRA (Cho et al. 2024): one LoRA of several ranks, cut for each silo; padded with zeros and weighted by norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import override

from silotune.aggregation import RankAggregation, Update, by_samples
from silotune.aggregation.factor_pairs import factor_pairs, factors_of, product_norm, without_factors
from silotune.core.tensors import copy
from silotune.methods import GLOBAL, Part, Phase, Scalar, Scope, State, Step, Tensors, copies, mean_over_rows, private
from silotune.methods.supervised import Supervised, SupervisedOptions

RANK = "rank"
END_A, END_B = ".lora_A.weight", ".lora_B.weight"


class NormWeightedMeans(RankAggregation):
    """Means of A and of B padded with zeros to rank r, weighted by `‖B_k·A_k‖` per target module (Cho et al. 2024).

    All other tensors are averaged by the silos' rows; so are A and B where all products are zero. A factor that the
    round did not train (RoLoRA) stays as it is.
    """

    name = "hetlora"

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """Aggregate when the last update has arrived; all are kept until then."""
        all_updates, pairs = list(updates), factor_pairs(before)
        tensors = by_samples(without_factors(all_updates, pairs))
        for pair in pairs:
            factors = [factors_of(pair, update.tensors, update.before(before)) for update in all_updates]
            norms = [product_norm(b, a) for b, a in factors]
            if not any(norms):
                norms = [float(update.rows) for update in all_updates]
            mean_a, mean_b = (torch.zeros_like(before[name], dtype=torch.float64) for name in (pair.a, pair.b))
            for norm, (b, a) in zip(norms, factors, strict=True):
                mean_a[: len(a)] += norm / sum(norms) * a
                mean_b[:, : b.shape[1]] += norm / sum(norms) * b
            means = {pair.a: mean_a, pair.b: mean_b}
            names = means.keys() & all_updates[0].tensors.keys()
            tensors |= {name: means[name].to(before[name].dtype) for name in sorted(names)}
        return tensors


class HetLoRAOptions(SupervisedOptions):
    """The options of HetLoRA."""

    prune: float | None = Field(
        default=None, gt=0, lt=1, description="γ, share of the rank that a pruned silo keeps; None: no pruning"
    )
    penalty: float | None = Field(
        default=None, ge=0, description="λ, weight of the loss term on the ranks that pruning would remove"
    )

    @model_validator(mode="after")
    def _penalty_of_pruning(self) -> HetLoRAOptions:
        if self.penalty is not None and self.prune is None:
            raise ValueError("penalty: of the ranks that method.prune would take away; give method.prune, too")
        if self.prune is not None and self.adapters > 1:
            raise ValueError("prune: cuts the rank of one LoRA; allowed: method.adapters=1")
        return self


class HetLoRA(Supervised):
    """FedAvg of one LoRA by `NormWeightedMeans`.

    With `prune=γ` a silo's private rank r falls to γ·r when the norms of its last ranks, from γ·r on, are smaller
    after training than when received. Rows of A and columns of B above r are zero.
    """

    name = "hetlora"
    paper = "Cho et al. 2024, Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models"
    Options = HetLoRAOptions
    defaults = {"tuner": "lora", "aggregation": "hetlora"}
    tuners = ("lora",)
    scope = Scope.SHARED
    adapter_name = GLOBAL

    def parts(self) -> dict[str, Part]:
        """Return LoRA and head; with pruning also the silo's rank."""
        rank = {RANK: private(Scalar(float(self.setting.tuner.rank or 0)))}
        return super().parts() | (rank if cast(HetLoRAOptions, self.options).prune else {})

    def phases(self) -> list[Phase]:
        """One training phase; with pruning also a cut of the received LoRA before, and a pruning step after."""
        phases = super().phases()
        if not cast(HetLoRAOptions, self.options).prune:
            return phases
        return [copies("cut", {GLOBAL: cut}), *phases, copies("prune", {RANK: self.pruned, GLOBAL: cut})]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Cross-entropy, with pruning plus λ times the size of the last ranks."""
        cross_entropy, penalty = step.cross_entropy("full"), cast(HetLoRAOptions, self.options).penalty
        if not penalty:
            return cross_entropy
        size = self.last_ranks(step.state, step.state[GLOBAL])
        step.log(cross_entropy=cross_entropy, last_ranks=size)
        return cross_entropy + step.without_rows(penalty * size)

    def last_ranks(self, state: State, adapter: Tensors) -> Tensor:
        """Return `Σ ‖B[:, γr:r]‖·‖A[γr:r]‖` over an adapter's target modules, r being the silo's rank."""
        last = slice(self.smaller(state), rank_of(state))
        pairs = ((a, adapter[name.removesuffix(END_A) + END_B]) for name, a in adapter.items() if name.endswith(END_A))
        norms = [torch.linalg.norm(b[..., last]) * torch.linalg.norm(a[..., last, :]) for a, b in pairs]
        return torch.stack(norms).sum()

    def smaller(self, state: State) -> int:
        """Return γ·r, at least 1."""
        return max(1, int(rank_of(state) * (cast(HetLoRAOptions, self.options).prune or 1)))

    def pruned(self, state: State, received: State) -> Tensors:
        """Return the silo's rank after a round."""
        falls = bool(self.last_ranks(state, state[GLOBAL]) < self.last_ranks(state, received[GLOBAL]))
        return {"value": torch.full_like(state[RANK]["value"], self.smaller(state) if falls else rank_of(state))}


def rank_of(state: State) -> int:
    """Return a silo's rank after pruning."""
    rows = next(tensor.shape[-2] for name, tensor in state[GLOBAL].items() if name.endswith(END_A))
    return min(int(state[RANK]["value"]), rows)


def cut(state: State, received: State) -> Tensors:
    """Return the LoRA with zeros above the silo's rank."""
    tensors, rank = copy(state[GLOBAL]), rank_of(state)
    for name, tensor in tensors.items():
        (tensor if name.endswith(END_A) else tensor.mT)[..., rank:, :] = 0
    return tensors
