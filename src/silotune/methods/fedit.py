"""FedIT (Zhang et al. 2023): instruction tuning of one shared LoRA; silos count equally; with `mu`, FedProx."""

from __future__ import annotations

from typing import ClassVar, cast

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from silotune.methods import (
    GLOBAL,
    HEAD,
    Method,
    MethodOptions,
    Part,
    Phase,
    PredictionMix,
    Step,
    mean_over_rows,
    proximal,
    shared,
)


class FedITOptions(MethodOptions):
    """The options of FedIT."""

    mu: float = Field(
        default=0.0, ge=0, description="weight of FedProx's proximal term for the shared part; 0 is FedAvg"
    )


class FedIT(Method):
    """FedAvg, or FedProx, of one LoRA; the mean over silos counts each silo once (FedDPA, eq. 2)."""

    name = "fedit"
    paper = "Zhang et al. 2023, Towards Building the Federated GPT: Federated Instruction Tuning"
    Options = FedITOptions
    defaults = {"tuner": "lora", "head": "lm", "aggregation": "uniform"}
    head_of_global: ClassVar[str] = HEAD
    """The head that is trained with the shared part."""

    @override
    def parts(self) -> dict[str, Part]:
        return {GLOBAL: shared(self.setting.tuner), self.head_of_global: self.head()}

    def phases(self) -> list[Phase]:
        """One phase that trains the shared part."""
        return [Phase("global", trains=(GLOBAL, self.head_of_global), views={"global": {GLOBAL: 1}}, loss=self.loss)]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Cross-entropy, and `(mu / 2)·‖w − w_received‖²`."""
        cross_entropy = step.cross_entropy("global", self.head_of_global)
        mu = cast(FedITOptions, self.options).mu
        if not mu:
            return cross_entropy
        distance = proximal(step.state[GLOBAL], step.received[GLOBAL])
        step.log(cross_entropy=cross_entropy, distance=distance)
        return cross_entropy + step.without_rows(mu / 2 * distance)

    def prediction(self) -> PredictionMix:
        """Return the shared part and its head; all silos predict with the same model if the head is shared."""
        return PredictionMix({GLOBAL: 1}, self.head_of_global)
