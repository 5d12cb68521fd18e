"""Methods that share, keep or fix LoRA's factors A and B one by one: FFA-LoRA, FedSA-LoRA, RoLoRA.

The mean of the products `B_k·A_k` is the product of the means where one factor is the same in all silos.
"""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from silotune.methods import HEAD, OneModel, Part, Phase, Scope, TensorGroup, even, joined, odd

A, B = "lora_A", "lora_B"


class SplitLoRA(OneModel):
    """One LoRA, trained on cross-entropy. Subclasses set the scopes `a` and `b`, and may have phases of their own."""

    defaults = {"tuner": "lora"}
    tuners = ("lora",)
    a: ClassVar[Scope]
    b: ClassVar[Scope]
    mix = {joined(A, B): 1}

    @override
    def parts(self) -> dict[str, Part]:
        halves = {A: (self.a, "A"), B: (self.b, "B")}
        adapter = {name: Part(TensorGroup(self.setting.tuner, group), scope) for name, (scope, group) in halves.items()}
        return adapter | {HEAD: self.head()}

    def phases(self) -> list[Phase]:
        """One phase that trains all parts that are not fixed."""
        trained = tuple(name for name, part in self.parts().items() if part.scope is not Scope.FIXED)
        return [Phase("train", trains=trained, views={"full": self.mix}, loss=self.loss)]


class FFALoRA(SplitLoRA):
    """A stays as it was drawn, the same in all silos; B alone is trained and averaged.

    With one A for all, the mean of the products is the product of the mean: `mean(B_k·A) = mean(B_k)·A`.
    """

    name = "ffa-lora"
    paper = "Sun, Li, Li and Ding 2024, Improving LoRA in Privacy-preserving Federated Learning"
    a = Scope.FIXED
    b = Scope.SHARED


class FedSALoRA(SplitLoRA):
    """A is averaged, B stays in its silo, and both are trained.

    FedSA-LoRA shares A, which learns common features, and keeps B private in each silo.
    """

    name = "fedsa-lora"
    paper = "Guo et al. 2025, Selective Aggregation for Low-Rank Adaptation in Federated Learning"
    a = Scope.SHARED
    b = Scope.PRIVATE


class RoLoRA(SplitLoRA):
    """Silos train B in odd rounds and A in even ones.

    The other factor is the same in all silos of a round, so that the mean of the products is exact.
    """

    name = "rolora"
    paper = "Chen et al. 2025, Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA"
    a = Scope.SHARED
    b = Scope.SHARED

    def phases(self) -> list[Phase]:
        """Train B in odd rounds and A in even ones, because A has no gradient while B is zero."""
        views = {"full": self.mix}
        return [
            Phase("B", trains=(B, HEAD), views=views, loss=self.loss, rounds=odd),
            Phase("A", trains=(A, HEAD), views=views, loss=self.loss, rounds=even),
        ]
