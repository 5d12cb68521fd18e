"""Compute what noise on rows costs, and how much noise a cost needs.

A step of DP-SGD draws each unit with the same probability and adds Gaussian noise to the sum of the clipped gradients.
Neighboring data differ in one unit, emptied at its place (dp-accounting's REPLACE_SPECIAL), which moves the sum by at
most the bound.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from typing_extensions import override

from silotune.communication.privacy.accountant import Account, import_dp_accounting


def _event(multiplier: float, rate: float, steps: int) -> Any:
    dp = import_dp_accounting()
    gaussian = dp.GaussianDpEvent(multiplier)
    step = gaussian if rate == 1 else dp.PoissonSampledDpEvent(rate, gaussian)
    return dp.SelfComposedDpEvent(step, steps)


def _accountant() -> Any:
    dp = import_dp_accounting()
    return dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL)


@lru_cache
def noise_multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the smallest noise for (ε, δ) over so many steps, in multiples of the bound.

    Args:
        epsilon: ε of all steps.
        delta: δ of all steps.
        rate: the probability with which a step draws a unit.
        steps: their number; 0 needs no noise.
    """
    if steps == 0:
        return 0.0
    dp = import_dp_accounting()
    return float(dp.calibrate_dp_mechanism(_accountant, lambda z: _event(z, rate, steps), epsilon, delta))


@lru_cache
def row_epsilon(multiplier: float, delta: float, rate: float, steps: int) -> float:
    """Return ε at δ of so many steps with this noise, by privacy loss distributions."""
    if steps == 0:
        return 0.0
    return float(_accountant().compose(_event(multiplier, rate, steps)).get_epsilon(delta))


class RowAccount(Account):
    """Noise on rows in the silo that it costs most.

    Args:
        multiplier: standard deviation of the noise, in multiples of the bound.
        rate: the probability with which a step draws a unit.
        steps: noised steps after 1, 2, … rounds.
        delta: δ of the total.
    """

    mechanism = "dp-sgd"

    def __init__(self, multiplier: float, rate: float, steps: list[int], delta: float) -> None:
        super().__init__(delta)
        self.multiplier, self._rate, self._steps = multiplier, rate, steps

    @override
    def total(self, times: int) -> float:
        return row_epsilon(self.multiplier, self.delta, self._rate, self._steps[times - 1]) if times else 0.0
