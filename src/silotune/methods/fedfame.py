"""FedFAME (Malaviya et al. 2023): silos contrast and distill without labels; the coordinator trains on labeled rows."""

from __future__ import annotations

from typing import cast

from pydantic import Field
from torch import Tensor, nn

from silotune.methods import (
    GLOBAL,
    HEAD,
    Method,
    MethodOptions,
    Part,
    Phase,
    PredictionMix,
    Projection,
    Setting,
    Step,
    mean_over_rows,
    model_contrast,
    previous,
    received,
    shared,
)

PROJECTION = "head_projection"


class FedFAMEOptions(MethodOptions):
    """`tau`: eq. 2's temperature, which the paper does not state.

    `projection`: the projection head's width; `server_epochs`: E_g, the coordinator's passes over its labeled rows.
    """

    tau: float = Field(0.5, gt=0)
    projection: int = Field(256, ge=1, le=65536)
    server_epochs: int = Field(1, ge=1)


class FedFAME(Method):
    """Algorithm 1 with appendix A.1. All parts are shared, the head too, whatever the setting's head scope.

    In a silo's first participation its current, previous and received model are one: the gradient of eq. 4 is zero,
    and an optimizer would turn its rounding noise into whole steps. Such a silo keeps what it received.
    """

    name = "fedfame"
    paper = "Malaviya et al. 2023, Reducing Communication Overhead in Federated Learning for PLMs using PEFT (FedFAME)"
    Options = FedFAMEOptions
    unlabeled = True

    def __init__(self, setting: Setting, options: MethodOptions | None = None) -> None:
        super().__init__(setting, options)
        self.projection = Projection(self._options.projection, setting.head.pooling)

    def parts(self) -> dict[str, Part]:
        """Adapter, classifier, projection head (`W_D = Concat(W_D, W_proj)`)."""
        return {GLOBAL: shared(self.setting.tuner), HEAD: self.head(), PROJECTION: shared(self.projection)}

    def head(self) -> Part:
        """Shared: it learns from labels at the coordinator only."""
        return shared(self.setting.head)

    @property
    def remembers(self) -> tuple[str, ...]:
        """The parts with which `q` of the previous local model is computed."""
        return (GLOBAL, PROJECTION)

    def phases(self) -> list[Phase]:
        """Local training on texts alone."""
        views = {"own": {GLOBAL: 1}, "received": {received(GLOBAL): 1}, "previous": {previous(GLOBAL): 1}}
        return [Phase("train", trains=tuple(self.parts()), views=views, loss=self.loss, skips_first=True)]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """`L_con + L_distil` (eq. 4); no label is read."""
        q = self.projection(step.state[PROJECTION], step.views["own"])
        q_global = self.projection(step.received[PROJECTION], step.views["received"]).detach()
        q_previous = self.projection(step.previous(PROJECTION), step.views["previous"]).detach()
        contrastive = model_contrast(q, q_global, q_previous, self._options.tau)  # eq. 2
        teacher = self.setting.head.logits(step.received.get(HEAD, {}), step.views["received"], step.batch.task)
        targets = teacher.detach().softmax(-1)
        distillation = nn.functional.cross_entropy(step.logits("own"), targets)  # eq. 3
        step.log(contrastive=contrastive, distillation=distillation)
        return contrastive + distillation

    def server_phases(self) -> list[Phase]:
        """The coordinator trains the aggregated adapter and classifier on its labeled rows (eq. 5)."""
        epochs = self._options.server_epochs
        return [
            Phase("server", trains=(GLOBAL, HEAD), views={"own": {GLOBAL: 1}}, loss=self.server_loss, epochs=epochs)
        ]

    @mean_over_rows
    def server_loss(self, step: Step) -> Tensor:
        """Cross-entropy."""
        return step.cross_entropy("own")

    def prediction(self) -> PredictionMix:
        """The global model: every silo's is the same."""
        return PredictionMix({GLOBAL: 1})

    @property
    def _options(self) -> FedFAMEOptions:
        return cast(FedFAMEOptions, self.options)
