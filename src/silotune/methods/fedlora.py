"""FedLoRA (Yi et al. 2023): a shared LoRA, fine-tuned by every silo for itself when the rounds are over."""

from __future__ import annotations

from typing import ClassVar, cast

from pydantic import Field
from torch import Tensor

from silotune.methods import (
    GLOBAL,
    HEAD,
    HEAD_GLOBAL,
    PRIVATE,
    Part,
    Phase,
    PredictionMix,
    Step,
    mean_over_rows,
    private,
)
from silotune.methods.fedit import FedIT, FedITOptions


class FedLoRAOptions(FedITOptions):
    """The options of methods with a last phase for the local part."""

    local_epochs: int | None = Field(
        default=None, ge=1, description="passes over the rows in the phase after the last round; unset, as in a round"
    )


class FedLoRA(FedIT):
    """FedIT; after the last round every silo copies the global part to its local part and trains it on its rows."""

    name = "fedlora"
    paper = "Yi et al. 2023, FedLoRA: Model-Heterogeneous Personalized Federated Learning with LoRA Tuning"
    Options: ClassVar[type[FedITOptions]] = FedLoRAOptions
    head_of_global = HEAD_GLOBAL

    def parts(self) -> dict[str, Part]:
        """Return FedIT's parts, and a local part and head; the local part starts as the global one."""
        return super().parts() | {
            PRIVATE: private(self.setting.tuner, start=GLOBAL),
            HEAD: private(self.setting.head),
        }

    def phases(self) -> list[Phase]:
        """A phase of every round, then a final phase for the local part in every silo, sampled or not."""
        local = Phase(
            "local",
            trains=(PRIVATE, HEAD),
            views={"local": {PRIVATE: 1}},
            loss=self.local_loss,
            when="end",
            who="all",
            epochs=cast(FedLoRAOptions, self.options).local_epochs,
            start={PRIVATE: GLOBAL, HEAD: self.head_of_global},
        )
        return [*super().phases(), local]

    @mean_over_rows
    def local_loss(self, step: Step) -> Tensor:
        """Cross-entropy."""
        return step.cross_entropy("local")

    def prediction(self) -> PredictionMix:
        """Predict with the silo's fine-tuned model."""
        return PredictionMix({PRIVATE: 1})
