"""`SplitLoRA`, base of methods that give LoRA's A and B a scope each: two parts that a mix joins to one adapter."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from silotune.methods.base import Method, PredictionMix
from silotune.methods.parts import HEAD, Part, Scope
from silotune.methods.phase import Phase
from silotune.methods.step import Step, mean_over_rows
from silotune.models.forward.mixing import Mix, joined
from silotune.models.tuners import TensorGroup

A, B = "lora_A", "lora_B"


class SplitLoRA(Method):
    """One LoRA, trained on cross-entropy. Subclasses set the scopes `a` and `b`, and may have phases of their own."""

    defaults = {"tuner": "lora"}
    tuners = ("lora",)
    a: ClassVar[Scope]
    b: ClassVar[Scope]
    mix: ClassVar[Mix] = {joined(A, B): 1}

    @override
    def parts(self) -> dict[str, Part]:
        halves = {A: (self.a, "A"), B: (self.b, "B")}
        adapter = {name: Part(TensorGroup(self.setting.tuner, group), scope) for name, (scope, group) in halves.items()}
        return adapter | {HEAD: self.head()}

    def phases(self) -> list[Phase]:
        """One phase, of all that is not fixed."""
        trained = tuple(name for name, part in self.parts().items() if part.scope is not Scope.FIXED)
        return [Phase("train", trains=trained, views={"full": self.mix}, loss=self.loss)]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Return the cross-entropy of the model."""
        return step.cross_entropy("full")

    @override
    def prediction(self) -> PredictionMix:
        return PredictionMix(self.mix)
