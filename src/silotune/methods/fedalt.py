"""FedALT (Bian et al. 2025): a silo keeps its LoRA, the others' mean comes down, a mixer weighs both by token."""

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
    TokenMixer,
    copies,
    mean_over_rows,
    private,
    received,
    shared,
    token_weight,
)

MIXER = "mixer"


def mixed(own: str, others: str) -> Mix:
    """Return `g(x)·own + (1 − g(x))·others`, with g of each token at each target module."""
    return {own: token_weight(MIXER, 0), others: token_weight(MIXER, 1)}


class FedALT(Method):
    """The individual LoRA is trained and sent but not replaced; what comes down is constant and different in each silo.

    `aggregation=rest-of-world` (`aggregation/rest_of_world.py`) makes the mean of the others.
    """

    name = "fedalt"
    paper = "Bian et al. 2025, FedALT: Federated Fine-Tuning through Adaptive Local Training with Rest-of-World LoRA"
    defaults = {"tuner": "lora", "aggregation": "rest-of-world"}
    tuners = ("lora",)
    aggregations = ("rest-of-world",)

    def parts(self) -> dict[str, Part]:
        """What is sent and received; the silo's copy of what it sent; mixer and head, which stay."""
        tuner = self.setting.tuner
        return {
            GLOBAL: shared(tuner),
            PRIVATE: private(tuner, start=GLOBAL),
            MIXER: private(TokenMixer(tuner)),
            HEAD: private(self.setting.head),
        }

    def phases(self) -> list[Phase]:
        """The shared part goes on from what the silo sent last, beside what it received; the result is kept."""
        views = {"full": mixed(GLOBAL, received(GLOBAL))}
        trains = (GLOBAL, MIXER, HEAD)
        return [
            Phase("train", trains, views, self.loss, start={GLOBAL: PRIVATE}),
            copies("keep", {PRIVATE: GLOBAL}),
        ]

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Cross-entropy of the mixture."""
        return step.cross_entropy("full")

    def prediction(self) -> PredictionMix:
        """The silo's own LoRA and the others' mean."""
        return PredictionMix(mixed(PRIVATE, GLOBAL))
