"""FDLoRA (Qi et al. 2024): a personal and a global LoRA, an outer optimizer at the coordinator, a fusion of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from pydantic import Field
from torch import Tensor

from silotune.methods import (
    GLOBAL,
    HEAD_GLOBAL,
    HEAD_PRIVATE,
    PRIVATE,
    Method,
    MethodOptions,
    Mix,
    Part,
    Phase,
    PredictionMix,
    Scalar,
    State,
    Step,
    copies,
    mean_over_rows,
    private,
    shared,
)

FUSION = ("fusion_personal", "fusion_global")  # parts of one number each: w₁ and w₂


class FDLoRAOptions(MethodOptions):
    """The options of FDLoRA."""

    sync: int = Field(
        default=10,
        ge=1,
        description="H; every H rounds the personal LoRA becomes a copy of the silo's trained global LoRA",
    )
    first_epochs: int | None = Field(
        default=None, ge=1, description="passes in round 1, which trains the first personal LoRA"
    )
    fusion_epochs: int | None = Field(
        default=None, ge=1, description="passes that train the fusion weights at the end. None: `train.epochs`"
    )
    l1: float = Field(default=0.05, ge=0, description="weight of the L1 penalty on the fusion weights")


def learned(part: str) -> Callable[[State], Tensor]:
    """Return the function that reads a weight from a silo's state."""
    return lambda state: state[part]["value"]


FUSED: Mix = {PRIVATE: learned(FUSION[0]), GLOBAL: learned(FUSION[1])}

FUSED_HEADS: Mix = {HEAD_PRIVATE: FUSED[PRIVATE], HEAD_GLOBAL: FUSED[GLOBAL]}


class FDLoRA(Method):
    """FDLoRA: silos train a global LoRA under Nesterov momentum, and fuse it with their own at the end."""

    name = "fdlora"
    paper = "Qi et al. 2024, FDLoRA: Personalized Federated Learning of Large Language Model via Dual LoRA Tuning"
    Options = FDLoRAOptions
    defaults = {"tuner": "lora", "aggregation": "uniform", "server.optimizer": "nesterov", "server.lr": 0.7}
    tuners = ("lora",)

    def parts(self) -> dict[str, Part]:
        """Return both LoRAs with their heads, and the two fusion weights."""
        tuner, head = self.setting.tuner, self.setting.head
        personal, own_head = private(tuner, start=GLOBAL), private(head, start=HEAD_GLOBAL)
        models = {GLOBAL: shared(tuner), HEAD_GLOBAL: self.head(), PRIVATE: personal, HEAD_PRIVATE: own_head}
        return models | {name: private(Scalar(0.5)) for name in FUSION}

    def phases(self) -> list[Phase]:
        """Return the phases of round 1, of later rounds, of copies (first and every H-th round), and of the fusion."""
        options, personal = cast(FDLoRAOptions, self.options), {PRIVATE: GLOBAL, HEAD_PRIVATE: HEAD_GLOBAL}
        inner = Phase("inner", (GLOBAL, HEAD_GLOBAL), {"global": {GLOBAL: 1}}, self.loss, from_round=2)
        first = replace(inner, name="first", epochs=options.first_epochs, from_round=1, rounds=lambda n: n == 1)
        sync = copies("sync", personal, lambda n: n == 1 or n % options.sync == 0, also_first=True)
        fusion = Phase("fusion", FUSION, {"fused": FUSED}, self.fusion_loss, "end", "all", epochs=options.fusion_epochs)
        return [first, inner, sync, fusion]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Cross-entropy of the global LoRA."""
        return step.cross_entropy("global", HEAD_GLOBAL)

    @mean_over_rows
    def fusion_loss(self, step: Step) -> Tensor:
        """Cross-entropy of the fused model plus `l1·(|w₁| + |w₂|)`."""
        size = torch.stack([step.state[part]["value"].abs() for part in FUSION]).sum()
        cross_entropy = step.cross_entropy("fused", FUSED_HEADS)
        step.log(fusion_cross_entropy=cross_entropy)
        return cross_entropy + step.without_rows(cast(FDLoRAOptions, self.options).l1 * size)

    def prediction(self) -> PredictionMix:
        """Predict with the fused model."""
        return PredictionMix(FUSED, FUSED_HEADS)
