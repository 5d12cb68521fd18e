"""APFL (Deng et al. 2020): a mixture of the silo's own model and the shared one predicts, by a learned weight."""

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
    Mix,
    Part,
    Phase,
    PredictionMix,
    Scalar,
    State,
    Step,
    Tensors,
    frozen,
    mean_over_rows,
    private,
    shared,
)

ALPHA = "alpha"


class APFLOptions(MethodOptions):
    """The options of APFL."""

    alpha: float = Field(default=0.5, ge=0, le=1, description="α, the initial weight of a silo's own model")
    adaptive: bool = Field(default=True, description="whether silos train α")


def own_weight(state: State) -> Tensor:
    """Return α of a silo."""
    return state[ALPHA]["value"]


def shared_weight(state: State) -> Tensor:
    """Return 1 − α of a silo."""
    return 1 - state[ALPHA]["value"]


def projected(state: State) -> Tensors:
    """Return α in [0, 1]."""
    return {"value": state[ALPHA]["value"].clamp(0, 1)}


class APFL(Method):
    """APFL: w descends `f(w)`; v, and α if adaptive, descend `f(α·v + (1 − α)·w)` with w constant (Algorithm 1)."""

    name = "apfl"
    paper = "Deng, Kamani and Mahdavi 2020, Adaptive Personalized Federated Learning"
    Options = APFLOptions

    def mixture(self, own: str, common: str) -> Mix:
        """Return `α·own + (1 − α)·common`."""
        options = cast(APFLOptions, self.options)
        if options.adaptive:
            return {own: own_weight, common: shared_weight}
        return {own: options.alpha, common: 1 - options.alpha}

    def parts(self) -> dict[str, Part]:
        """Adapter and head of w and of v, which starts as w; and α."""
        tuner, head, options = self.setting.tuner, self.setting.head, cast(APFLOptions, self.options)
        parts = {GLOBAL: shared(tuner), HEAD_GLOBAL: self.head()}
        parts |= {PRIVATE: private(tuner, start=GLOBAL)}
        parts |= {HEAD_PRIVATE: private(head, start=HEAD_GLOBAL)}
        return parts | ({ALPHA: private(Scalar(options.alpha))} if options.adaptive else {})

    def phases(self) -> list[Phase]:
        """One phase in which v, w and α step together; α is then projected to [0, 1]."""
        views = {"global": {GLOBAL: 1}, "mixture": self.mixture(PRIVATE, frozen(GLOBAL))}
        then = {ALPHA: projected} if cast(APFLOptions, self.options).adaptive else {}
        return [Phase("train", trains=tuple(self.parts()), views=views, loss=self.loss, then=then)]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Return the sum of both losses: each part has a gradient of its own one alone."""
        common = step.cross_entropy("global", HEAD_GLOBAL)
        mixed = step.cross_entropy("mixture", self.mixture(HEAD_PRIVATE, frozen(HEAD_GLOBAL)))
        step.log(global_cross_entropy=common, mixture_cross_entropy=mixed)
        return common + mixed

    def prediction(self) -> PredictionMix:
        """Predict with the mixture."""
        return PredictionMix(self.mixture(PRIVATE, GLOBAL), self.mixture(HEAD_PRIVATE, HEAD_GLOBAL))
