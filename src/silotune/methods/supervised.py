"""The plain case that several methods share: one or two adapters, one head, cross-entropy on the labels."""

from __future__ import annotations

from typing import ClassVar, Literal, cast

from torch import Tensor

from silotune.methods.base import HEAD, Method, MethodOptions, Phase, PredictionMix, Step
from silotune.methods.parts import Part, Scope
from silotune.models.forward.mixing import Mix


class SupervisedOptions(MethodOptions):
    """`adapters`: how many parts sit at each site, averaged (the FedMCP setting gives its baselines two)."""

    adapters: Literal[1, 2] = 1


class Supervised(Method):
    """Adapters of one scope under cross-entropy; subclasses name the scope and may add to the loss."""

    Options = SupervisedOptions
    scope: ClassVar[Scope]
    stem: ClassVar[str]

    @property
    def adapters(self) -> list[str]:
        """The names of the adapter parts."""
        number = cast(SupervisedOptions, self.options).adapters
        return [self.stem] if number == 1 else [self.stem, f"{self.stem}_2"]

    @property
    def mix(self) -> Mix:
        """All adapters, averaged."""
        return {name: 1 / len(self.adapters) for name in self.adapters}

    def parts(self) -> dict[str, Part]:
        """See `Method.parts`."""
        adapters = {name: Part(self.setting.tuner, self.scope) for name in self.adapters}
        return adapters | {HEAD: self.head()}

    def phases(self) -> list[Phase]:
        """See `Method.phases`."""
        return [Phase("train", trains=(*self.adapters, HEAD), views={"full": self.mix}, loss=self.loss)]

    def loss(self, step: Step) -> Tensor:
        """Cross-entropy of the full model."""
        return step.cross_entropy("full")

    def prediction(self) -> PredictionMix:
        """See `Method.prediction`."""
        return PredictionMix(self.mix)
