"""Ditto (Li et al. 2021): a private adapter held near the shared one, which is trained as in FedAvg."""

from __future__ import annotations

from typing import cast

from pydantic import Field
from torch import Tensor

from silotune.methods import (
    GLOBAL,
    HEAD_GLOBAL,
    HEAD_PRIVATE,
    PRIVATE,
    Method,
    MethodOptions,
    Part,
    Phase,
    PredictionMix,
    Step,
    mean_over_rows,
    private,
    proximal,
    shared,
)


class DittoOptions(MethodOptions):
    """The options of Ditto."""

    lam: float = Field(
        default=0.1, ge=0, description="λ, regularization of the personal adapter toward the received one"
    )


class Ditto(Method):
    """Ditto: a pass of the global objective, then of the personal one, `CE + (λ/2)·‖v − w‖²` (Algorithm 1, eq. 1)."""

    name = "ditto"
    paper = "Li et al. 2021, Ditto: Fair and Robust Federated Learning Through Personalization"
    Options = DittoOptions

    def parts(self) -> dict[str, Part]:
        """Return a shared and a personal adapter, which start equal."""
        tuner, head = self.setting.tuner, self.setting.head
        return {
            GLOBAL: shared(tuner),
            PRIVATE: private(tuner, start=GLOBAL),
            HEAD_GLOBAL: self.head(),
            HEAD_PRIVATE: private(head),
        }

    def phases(self) -> list[Phase]:
        """Two phases: the global adapter, then the personal one."""
        return [
            Phase("global", trains=(GLOBAL, HEAD_GLOBAL), views={"global": {GLOBAL: 1}}, loss=self.global_loss),
            Phase("personal", trains=(PRIVATE, HEAD_PRIVATE), views={"own": {PRIVATE: 1}}, loss=self.personal_loss),
        ]

    @mean_over_rows
    def global_loss(self, step: Step) -> Tensor:
        """Cross-entropy of the global model."""
        return step.cross_entropy("global", HEAD_GLOBAL)

    @mean_over_rows
    def personal_loss(self, step: Step) -> Tensor:
        """Cross-entropy of the personal model plus the proximal term."""
        cross_entropy = step.cross_entropy("own", HEAD_PRIVATE)
        distance = proximal(step.state[PRIVATE], step.received[GLOBAL])
        step.log(personal_cross_entropy=cross_entropy, distance=distance)
        return cross_entropy + step.without_rows(cast(DittoOptions, self.options).lam / 2 * distance)

    def prediction(self) -> PredictionMix:
        """Predict with the personal model."""
        return PredictionMix({PRIVATE: 1}, HEAD_PRIVATE)
