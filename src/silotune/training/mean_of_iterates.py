"""Replace the shared parts by their mean over the last rounds of a stage of a run (`server.average`).

Steps under noise end some way off the minimum that they walk around, and their mean ends nearer to it (Polyak and
Juditsky 1992). It is taken of what silos were sent anyway, so that it costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from silotune.core.tensors import Tensors

_COUNT = "rounds"


@dataclass
class MeanOfIterates:
    """Sums the shared tensors of each stage's last rounds.

    Args:
        fraction: of a stage's rounds, at least one of which is in the mean.
        ends: the last round of each stage, ascending; each begins after the one before.
        state: the sums in float64 by name, and how many rounds are in them; empty between stages.
    """

    fraction: float
    ends: Sequence[int]
    state: Tensors = field(default_factory=dict)

    def after(self, number: int, shared: Tensors) -> Tensors | None:
        """Add what a round ended with; return the mean if it was the last of its stage."""
        last = next((end for end in self.ends if number <= end), 0)
        before = max((end for end in self.ends if end < number), default=0)
        if number <= last - max(1, math.ceil(self.fraction * (last - before))):
            return None
        rounds = self.state.get(_COUNT, torch.zeros((), dtype=torch.float64)) + 1
        sums = {name: self.state.get(f"sum/{name}", 0) + tensor.double() for name, tensor in shared.items()}
        self.state = {_COUNT: rounds} | {f"sum/{name}": total for name, total in sums.items()}
        if number < last:
            return None
        self.state = {}
        return {name: (total / rounds).to(shared[name].dtype) for name, total in sums.items()}
