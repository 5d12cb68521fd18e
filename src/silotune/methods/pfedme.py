"""pFedMe (Dinh et al. 2020): a silo's model θ minimizes its loss near the shared w (a Moreau envelope); w follows θ."""

from __future__ import annotations

from functools import partial
from typing import cast

from pydantic import Field
from torch import Tensor

from silotune.methods import (
    GLOBAL,
    HEAD,
    HEAD_GLOBAL,
    PRIVATE,
    Method,
    MethodOptions,
    Part,
    Phase,
    PredictionMix,
    State,
    Step,
    Tensors,
    mean_over_rows,
    private,
    proximal,
    shared,
)


class PFedMeOptions(MethodOptions):
    """The options of pFedMe."""

    lam: float = Field(default=15.0, gt=0, description="λ, regularization of θ toward w")
    steps: int = Field(default=5, ge=1, description="K, the steps of θ on each batch")
    eta: float = Field(default=0.005, gt=0, description="η, the learning rate of w")


class PFedMe(Method):
    """pFedMe: on each batch θ takes K steps on `f(θ) + (λ/2)·‖θ − w‖²`, then `w ← w − η·λ·(w − θ)`.

    The coordinator's `w ← (1 − β)·w + β·mean` is `server.lr=β`.
    """

    name = "pfedme"
    paper = "Dinh, Tran and Nguyen 2020, Personalized Federated Learning with Moreau Envelopes"
    Options = PFedMeOptions

    def parts(self) -> dict[str, Part]:
        """Return four parts: adapter and head of w, adapter and head of θ."""
        tuner, head = self.setting.tuner, self.setting.head
        return {
            GLOBAL: shared(tuner),
            HEAD_GLOBAL: self.head(),
            PRIVATE: private(tuner, start=GLOBAL),
            HEAD: private(head, start=HEAD_GLOBAL),
        }

    def phases(self) -> list[Phase]:
        """One phase: θ starts every round as w, as in the authors' code, and w changes after each batch's K steps."""
        follows = {GLOBAL: PRIVATE, HEAD_GLOBAL: HEAD}
        return [
            Phase(
                "train",
                trains=(PRIVATE, HEAD),
                views={"own": {PRIVATE: 1}},
                loss=self.loss,
                start={own: common for common, own in follows.items()},
                steps_per_batch=cast(PFedMeOptions, self.options).steps,
                then={common: partial(self.outer_step, common, own) for common, own in follows.items()},
            )
        ]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Cross-entropy of θ plus `(λ/2)·‖θ − w‖²` (eq. 3), w being the silo's present one."""
        adapter = proximal(step.state[PRIVATE], step.state[GLOBAL])
        distance = adapter + proximal(step.state[HEAD], step.state[HEAD_GLOBAL])
        cross_entropy = step.cross_entropy("own")
        step.log(cross_entropy=cross_entropy, distance=distance)
        return cross_entropy + step.without_rows(cast(PFedMeOptions, self.options).lam / 2 * distance)

    def outer_step(self, common: str, own: str, state: State) -> Tensors:
        """Return `w − η·λ·(w − θ)` of a part."""
        options = cast(PFedMeOptions, self.options)
        rate = options.eta * options.lam
        return {name: w - rate * (w - state[own][name]) for name, w in state[common].items()}

    def prediction(self) -> PredictionMix:
        """Predict with θ."""
        return PredictionMix({PRIVATE: 1})
