"""Share one mechanism's noise out among the silos of a sum under masks (Kairouz, Liu and Steinke 2021).

Every silo adds round(X) with a Gaussian X of deviation σ/√h to its sum of whole numbers, and the sum over silos is all
that anybody sees. If h of the shares stay secret, it is as noisy as if one party had added Gaussian noise of σ:

1. The sum of m ≥ h such numbers has the law of B(Y), where Y is Gaussian of √m·σ/√h, and B goes from a real number y to
   the whole number z with the probability β(z − y), for the centered B-spline β of order m. Both laws are less than
   e^(−10⁹) apart (docs/shares.md), because a share has more than 2¹⁶ steps in one deviation.
2. These probabilities sum to 1 for every y, and they depend on z − y alone. So k plus the shares is B(k + Y) for whole
   numbers k: it follows from the output k + Y of the exact mechanism, and nothing is added to ε.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from silotune.communication.masks.fixed_point import MOST_SILOS, MOST_WEIGHT
from silotune.communication.privacy.accountant import assumption
from silotune.communication.privacy.integer_noise import grid_of
from silotune.communication.privacy.row_accountant import noise_multiplier
from silotune.core.tensors import Tensors
from silotune.errors import InputError, SilotuneError

_FINENESS = 1024

_FARTHEST = 15
"""No number that `rounded_numbers` draws has so many deviations."""


def common_multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the noise of a run that all its silos share, in multiples of the clipping bound.

    It is that for δ/2, with which a silo's ledger allows a run that may use its whole budget, rounded up, so that all
    machines agree to the bit.
    """
    return math.ceil(noise_multiplier(epsilon, delta / 2, rate, steps) * _FINENESS) / _FINENESS


@dataclass(frozen=True)
class SharedNoise:
    """What the silos of a run agree on about the noise that they add together.

    Args:
        multiplier: σ of h shares together, in multiples of the bound.
        clip: the bound C on a unit's gradient.
        rate: the probability with which a step draws a unit.
        least: the fewest silos of a sum.
        colluders: how many of them may spy, help the coordinator, or add no noise.
    """

    multiplier: float
    clip: float
    rate: float
    least: int
    colluders: int

    @property
    def honest(self) -> int:
        """The number h of shares that have σ together; any silo can subtract its own, so one at least is left out."""
        return self.least - max(1, self.colluders)

    @property
    def deviation(self) -> float:
        """The standard deviation σ of h shares together."""
        return self.multiplier * self.clip

    @property
    def silo_deviation(self) -> float:
        """The standard deviation of one silo's share."""
        return self.deviation / math.sqrt(self.honest)

    @property
    def grid(self) -> float:
        """The step of the whole numbers."""
        return grid_of(self.clip, self.deviation)

    @property
    def text(self) -> str:
        """All of it, for the agreement of a sum."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, text: str) -> SharedNoise:
        """Return what `text` wrote."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise InputError("privacy.shares: a silo describes the shared noise in another form") from error

    @property
    def assumption(self) -> str:
        """The assumption under which ε holds, for people."""
        return assumption(self.colluders)

    def summand(self, units: int, sums: Tensors, before: Tensors) -> Tensor:
        """Return a silo's summand, int64: its number of units, and the noised sums of all tensors that it sends.

        It cannot wrap around: |sum| of 50 silos is at most 50 · 2²⁰ units · C/grid < 2⁵⁶, and a share is below 2²⁴.
        """
        if not 1 <= units <= MOST_WEIGHT or not {*sums} <= {*before}:
            raise SilotuneError(f"a sum under masks is of at most {MOST_WEIGHT:,} units of a silo (here {units:,})")
        pieces = [
            sums[name] if name in sums else torch.zeros_like(before[name], dtype=torch.int64) for name in sorted(before)
        ]
        return torch.cat([torch.tensor([units]), *(piece.cpu().reshape(-1) for piece in pieces)])

    def mean_gradient(self, total: Tensor, before: Tensors) -> tuple[Tensors, int]:
        """Return the noised mean of the units' clipped gradients, float64, and how many units the silos have.

        Args:
            total: the sum of the summands, int64.
            before: the tensors of the broadcast that silos send.

        Raises:
            SilotuneError: no summands of silos have this sum.
        """
        units = int(total[0])
        most = (units * self.clip + MOST_SILOS * _FARTHEST * self.silo_deviation) / self.grid + MOST_SILOS
        if not 1 <= units <= MOST_SILOS * MOST_WEIGHT or bool((total[1:].abs() > most).any()):
            raise SilotuneError("the sum under masks is out of its range: a silo did not keep to the protocol")
        pieces = torch.split(total[1:], [tensor.numel() for _, tensor in sorted(before.items())])
        step = self.grid / (self.rate * units)
        return {
            name: piece.double().reshape(tensor.shape) * step
            for (name, tensor), piece in zip(sorted(before.items()), pieces, strict=True)
        }, units
