"""RAVAN (Raje et al. 2025): FedAvg of matrices between fixed bases, each times the scale that was trained with it."""

from __future__ import annotations

from functools import partial

import torch

from silotune.methods import GLOBAL, Phase, Scope, State, Supervised, Tensors, copies
from silotune.models.tuners.fed_sb import MIDDLE
from silotune.models.tuners.ravan import SCALES


class RAVAN(Supervised):
    """Silos train `H_i` and `s_i` and send `s_i·H_i`, whose mean is exact: `Σ_i B_i·mean(s_i·H_i)·A_i`.

    Every round begins with scales of 1. All silos train all heads; the paper also lets weak ones train a part of them.
    """

    name = "ravan"
    paper = "Raje et al. 2025, Ravan: Multi-Head Low-Rank Adaptation for Federated Fine-Tuning"
    defaults = {"tuner": "ravan"}
    tuners = ("ravan",)
    scope = Scope.SHARED
    adapter_name = GLOBAL

    def phases(self) -> list[Phase]:
        """Return the training phase, and after it the fold of scales into matrices."""
        folds = [copies("fold", {name: partial(folded, name) for name in self.adapters})]
        return [*super().phases(), *(folds if self.adapters else [])]


def folded(part: str, state: State, received: State) -> Tensors:
    """Return a part with `s_i·H_i` in place of H_i, and scales of 1."""
    tensors = dict(state[part])
    for name in [name for name in tensors if name.endswith(SCALES)]:
        middle, scales = name.removesuffix(SCALES) + MIDDLE, tensors[name]
        tensors |= {middle: scales[:, None, None] * tensors[middle], name: torch.ones_like(scales)}
    return tensors
