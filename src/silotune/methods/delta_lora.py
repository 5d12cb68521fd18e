"""`DeltaLoRA`, base of methods whose coordinator puts products B·A into a delta of the frozen weights."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from silotune.methods.base import Method, PredictionMix
from silotune.methods.parts import GLOBAL, HEAD, Part, shared
from silotune.methods.phase import Phase
from silotune.methods.step import Step, mean_over_rows
from silotune.models.forward.mixing import Mix
from silotune.models.tuners import Delta

DELTA = "delta"


class DeltaLoRA(Method):
    """One shared LoRA, trained on cross-entropy over weights with a delta, which only comes down.

    Subclasses bring the aggregation that makes the delta, and may draw the LoRA anew after every round (`redrawn`).
    """

    tuners = ("lora",)
    redrawn: ClassVar[bool] = False
    mix: ClassVar[Mix] = {GLOBAL: 1, DELTA: 1}

    @override
    def parts(self) -> dict[str, Part]:
        tuner = self.setting.tuner
        return {GLOBAL: shared(tuner, self.redrawn), DELTA: shared(Delta(tuner)), HEAD: self.head()}

    def phases(self) -> list[Phase]:
        """One phase, of LoRA and head."""
        return [Phase("train", trains=(GLOBAL, HEAD), views={"full": self.mix}, loss=self.loss)]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Return the cross-entropy of the model."""
        return step.cross_entropy("full")

    @override
    def prediction(self) -> PredictionMix:
        return PredictionMix(self.mix)
