"""FedFAME (Malaviya et al. 2023): silos contrast and distill without labels; the coordinator trains on labeled rows."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from pydantic import Field
from torch import Tensor

from silotune.methods import (
    GLOBAL,
    HEAD,
    Method,
    MethodOptions,
    Part,
    Phase,
    PredictionMix,
    Projection,
    Scope,
    Setting,
    Step,
    distillation,
    mean_over_rows,
    model_contrast,
    previous,
    received,
    row_cosine,
    row_cosine_by_distance,
    shared,
)

PROJECTION = "head_projection"


class FedFAMEOptions(MethodOptions):
    """The options of FedFAME."""

    tau: float = Field(default=0.5, gt=0, description="eq. 2's temperature, which the paper does not state")
    distillation: float = Field(default=1.0, ge=0, description="weight of eq. 3; the paper's is 1, and 0 leaves it out")
    projection: int = Field(default=256, ge=1, le=65536, description="the projection head's width")
    server_epochs: int = Field(default=1, ge=1, description="E_g, the coordinator's passes over its labeled rows")
    guard: bool = Field(
        default=True,
        description="compute gradients that are zero at the received model as exact zeros; `false` repeats runs of "
        "silotune 0.1, whose first steps followed rounding errors",
    )


class FedFAME(Method):
    """FedFAME by its Algorithm 1 and appendix A.1; all parts are shared, also the head, whatever its scope.

    A silo's model starts every participation as the received one: in the first step eq. 3 and the positive pair of
    eq. 2 have no gradient, exactly (`Phase.same_at_start`), because Adam would turn rounding into whole steps. In a
    silo's first participation the previous model is the received one, too, and eq. 4 has no gradient at all: such a
    silo keeps what it received.
    """

    name = "fedfame"
    paper = "Malaviya et al. 2023, Reducing Communication Overhead in Federated Learning for PLMs using PEFT (FedFAME)"
    Options = FedFAMEOptions
    unlabeled = True
    head_scope = Scope.SHARED  # only the coordinator trains it on labels

    def __init__(self, setting: Setting, options: MethodOptions | None = None) -> None:
        super().__init__(setting, options)
        self.projection = Projection(self._options.projection, setting.head.pooling)

    def parts(self) -> dict[str, Part]:
        """Adapter, classifier, projection head (`W_D = Concat(W_D, W_proj)`)."""
        return {GLOBAL: shared(self.setting.tuner), HEAD: self.head(), PROJECTION: shared(self.projection)}

    @property
    def remembers(self) -> tuple[str, ...]:
        """The parts with which `q` of the previous local model is computed."""
        return (GLOBAL, PROJECTION)

    def phases(self) -> list[Phase]:
        """One phase that trains on texts without labels."""
        views = {"own": {GLOBAL: 1}, "received": {received(GLOBAL): 1}, "previous": {previous(GLOBAL): 1}}
        train = Phase("train", trains=tuple(self.parts()), views=views, loss=self.loss, skips_first=True)
        return [replace(train, same_at_start={"received": "own"}) if self._options.guard else train]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Return `L_con + L_distil` (eq. 4), which reads no label."""
        q = self.projection(step.state[PROJECTION], step.views["own"])
        q_global = self.projection(step.received[PROJECTION], step.views["received"]).detach()
        q_previous = self.projection(step.previous(PROJECTION), step.views["previous"]).detach()
        guard = self._options.guard
        similarity = row_cosine_by_distance if guard else row_cosine
        contrastive = model_contrast(q, q_global, q_previous, self._options.tau, similarity)  # eq. 2
        teacher = self.setting.head.logits(step.received.get(HEAD, {}), step.views["received"], step.batch.task)
        distilled = distillation(step.logits("own"), teacher, exact=guard)  # eq. 3
        step.log(contrastive=contrastive, distillation=distilled)
        return contrastive + self._options.distillation * distilled

    def server_phases(self) -> list[Phase]:
        """One phase in which the coordinator trains adapter and classifier on its labeled rows (eq. 5)."""
        epochs = self._options.server_epochs
        return [
            Phase("server", trains=(GLOBAL, HEAD), views={"own": {GLOBAL: 1}}, loss=self.server_loss, epochs=epochs)
        ]

    @mean_over_rows
    def server_loss(self, step: Step) -> Tensor:
        """Cross-entropy."""
        return step.cross_entropy("own")

    def prediction(self) -> PredictionMix:
        """Predict with the global model, which is the same in every silo."""
        return PredictionMix({GLOBAL: 1})

    @property
    def _options(self) -> FedFAMEOptions:
        return cast(FedFAMEOptions, self.options)
