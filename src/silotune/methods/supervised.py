"""Bases of FedAvg and its relatives: one model, whose adapters and head are trained on cross-entropy."""

from __future__ import annotations

from typing import ClassVar, Literal, cast

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from silotune.methods.base import Method, MethodOptions, PredictionMix
from silotune.methods.parts import HEAD, Part, Scope
from silotune.methods.phase import Phase
from silotune.methods.step import Step, mean_over_rows
from silotune.models.forward.mixing import Mix


class SupervisedOptions(MethodOptions):
    """The options of methods that train one shared or private model by its loss alone."""

    adapters: Literal[0, 1, 2] = Field(
        default=1,
        description="number of adapters per target module, which are averaged (two in FedMCP's Table I); 0: none, the "
        "head reads the untouched backbone",
    )


class OneModel(Method):
    """One mix of parts, the view `full`, that is trained on cross-entropy and predicts.

    Subclasses set `mix`, and may add terms to the loss.
    """

    mix: Mix

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Return the cross-entropy of the full model."""
        return step.cross_entropy("full")

    @override
    def prediction(self) -> PredictionMix:
        return PredictionMix(self.mix)


class Supervised(OneModel):
    """Adapters of one scope, trained on cross-entropy.

    Subclasses set `scope` and `adapter_name`, and may add terms to the loss.
    """

    Options = SupervisedOptions
    scope: ClassVar[Scope]
    adapter_name: ClassVar[str]
    """Name of the adapter part; a second adapter is called `<name>_2`."""

    @property
    def adapters(self) -> list[str]:
        """The names of the adapter parts."""
        number = cast(SupervisedOptions, self.options).adapters
        return [self.adapter_name, f"{self.adapter_name}_2"][:number]

    @property
    def mix(self) -> Mix:  # type: ignore[override]
        """The average of all adapters."""
        return {name: 1 / len(self.adapters) for name in self.adapters}

    @override
    def parts(self) -> dict[str, Part]:
        adapters = {name: Part(self.setting.tuner, self.scope) for name in self.adapters}
        return adapters | {HEAD: self.head()}

    @override
    def phases(self) -> list[Phase]:
        return [Phase("train", trains=(*self.adapters, HEAD), views={"full": self.mix}, loss=self.loss)]
