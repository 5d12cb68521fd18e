"""FedMatch (Chen et al. 2021): a shared adapter and a private one (the patch), trained together."""

from __future__ import annotations

from torch import Tensor

from silotune.methods import (
    GLOBAL,
    HEAD,
    PRIVATE,
    Method,
    Mix,
    Part,
    Phase,
    PredictionMix,
    Step,
    mean_over_rows,
    private,
    shared,
)

FULL: Mix = {GLOBAL: 0.5, PRIVATE: 0.5}


class FedMatch(Method):
    """The backbone-patch architecture in the PEFT setting: the adapter is averaged, patch and head stay."""

    name = "fedmatch"
    paper = "Chen et al. 2021, FedMatch: Federated Learning Over Heterogeneous Question Answering Data"

    def parts(self) -> dict[str, Part]:
        """Adapter, patch, head."""
        tuner = self.setting.tuner
        return {GLOBAL: shared(tuner), PRIVATE: private(tuner), HEAD: private(self.setting.head)}

    def phases(self) -> list[Phase]:
        """Everything trains together."""
        return [Phase("train", trains=(GLOBAL, PRIVATE, HEAD), views={"full": FULL}, loss=self.loss)]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Cross-entropy of the full model."""
        return step.cross_entropy("full")

    def prediction(self) -> PredictionMix:
        """The full model."""
        return PredictionMix(FULL)
