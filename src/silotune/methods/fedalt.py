"""FedALT (Bian et al. 2025): a silo keeps its LoRA, the others' mean comes down, a mixer weighs both by token."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from typing_extensions import override

from silotune.aggregation import SiloAggregation, Update
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
    Tensors,
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


class RestOfWorld(SiloAggregation):
    """A silo receives the mean of the others' last updates, each counted once (FedALT, Bian et al. 2025).

    A silo that was not sampled, or whose update was refused, counts with its last one; one that never sent an update
    does not count. Without any other silo's update all tensors are zero, so that such a LoRA does nothing. The
    coordinator's own tensors are the mean of all silos' last updates.
    """

    name = "rest-of-world"
    changes_add_up = False  # a silo's tensors do not go on from what it received

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        state = dict(self.state)
        for update in updates:
            state |= {f"{update.silo}/{name}": tensor for name, tensor in update.tensors.items()}
        self.state = state
        sums = self._sums()
        return {name: (total / count).to(before[name].dtype) for name, (total, count) in sums.items()}

    @override
    def issued(self, shared: Tensors, silo: str) -> Tensors:
        if not self.state:
            return shared
        result = {}
        for name, (total, count) in self._sums().items():
            own = self.state.get(f"{silo}/{name}")
            others = count - (own is not None)
            rest = total if own is None else total - own.double()
            result[name] = (rest / others if others else torch.zeros_like(total)).to(shared[name].dtype)
        return shared | result

    def _sums(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Return name → the sum over silos in float64, in name order, and their number."""
        sums: dict[str, tuple[torch.Tensor, int]] = {}
        for key in sorted(self.state):
            _, part, tensor = key.rsplit("/", 2)
            total, count = sums.get(f"{part}/{tensor}", (torch.zeros((), dtype=torch.float64), 0))
            sums[f"{part}/{tensor}"] = total + self.state[key].double(), count + 1
        return sums


class FedALT(Method):
    """FedALT: each silo trains and sends its own LoRA, and receives the frozen mean of the other silos' LoRAs.

    `RestOfWorld` makes the mean of the others.
    """

    name = "fedalt"
    paper = "Bian et al. 2025, FedALT: Federated Fine-Tuning through Adaptive Local Training with Rest-of-World LoRA"
    defaults = {"tuner": "lora", "aggregation": "rest-of-world"}
    tuners = ("lora",)
    aggregations = ("rest-of-world",)

    def parts(self) -> dict[str, Part]:
        """Return the parts: the LoRA that is sent, the others' mean that comes back, and the private mixer and head."""
        tuner = self.setting.tuner
        return {
            GLOBAL: shared(tuner),
            PRIVATE: private(tuner, start=GLOBAL),
            MIXER: private(TokenMixer(tuner)),
            HEAD: private(self.setting.head),
        }

    def phases(self) -> list[Phase]:
        """Train the silo's own LoRA, starting from the one it sent last, beside the received mean; keep the result."""
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
        """Predict with the silo's own LoRA and the mean of the others."""
        return PredictionMix(mixed(PRIVATE, GLOBAL))
