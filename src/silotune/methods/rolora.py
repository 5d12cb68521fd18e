"""RoLoRA (Chen et al. 2025): silos train B in odd rounds and A in even ones, with the other as all have it."""

from __future__ import annotations

from silotune.methods import HEAD, Phase, Scope, even, odd
from silotune.methods.split_lora import A, B, SplitLoRA


class RoLoRA(SplitLoRA):
    """One factor is the same in all silos of a round, so that the mean of the products is exact."""

    name = "rolora"
    paper = "Chen et al. 2025, Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA"
    a = Scope.SHARED
    b = Scope.SHARED

    def phases(self) -> list[Phase]:
        """B first: it starts at zero, and A has no gradient as long as B is zero."""
        views = {"full": self.mix}
        return [
            Phase("B", trains=(B, HEAD), views=views, loss=self.loss, rounds=odd),
            Phase("A", trains=(A, HEAD), views=views, loss=self.loss, rounds=even),
        ]
