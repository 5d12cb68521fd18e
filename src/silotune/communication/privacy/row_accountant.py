"""Compute the privacy cost of noise on rows, and the noise for a given cost.

A step of DP-SGD draws each unit with the same probability and adds Gaussian noise to the sum of the clipped gradients.
Neighboring data differ in one unit, emptied at its place (dp-accounting's REPLACE_SPECIAL), which moves the sum by at
most the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from typing_extensions import override

from silotune.communication.privacy.accountant import Account, import_dp_accounting
from silotune.errors import InputError


def _event(multiplier: float, rate: float, steps: int) -> Any:
    dp = import_dp_accounting()
    gaussian = dp.GaussianDpEvent(multiplier)
    step = gaussian if rate == 1 else dp.PoissonSampledDpEvent(rate, gaussian)
    return dp.SelfComposedDpEvent(step, steps)


_INTERVAL = 1e-3
"""Steps of privacy losses: seven times as fast as the library's own 1e-4, at an ε larger by less than a hundredth."""


def _accountant() -> Any:
    dp = import_dp_accounting()
    return dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=_INTERVAL)


@lru_cache
def noise_multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the smallest noise, in multiples of the clipping bound, with which so many steps cost at most (ε, δ).

    A step draws each unit with the probability `rate`; 0 steps need no noise.
    """
    if steps == 0:
        return 0.0
    dp = import_dp_accounting()
    enough = RenyiFilter.of(epsilon, delta).least_multiplier([0.0] * MOST_ORDERS, rate, steps)
    if enough is None:
        raise InputError(f"privacy.epsilon: ε = {epsilon:g} is too little for {steps} steps")
    little = enough / 2
    while row_epsilon(little, delta, rate, steps) <= epsilon:
        if little < _LITTLE:  # δ alone may cover units that are hardly ever drawn
            return little
        enough, little = little, little / 2
    bracket = dp.ExplicitBracketInterval(little, enough)
    return float(
        dp.calibrate_dp_mechanism(
            _accountant, lambda z: _event(z, rate, steps), epsilon, delta, bracket, tol=_CLOSE * enough
        )
    )


@lru_cache
def row_epsilon(multiplier: float, delta: float, rate: float, steps: int) -> float:
    """Return the ε that so many steps with this noise cost at δ, by privacy loss distributions."""
    if steps == 0:
        return 0.0
    return float(_accountant().compose(_event(multiplier, rate, steps)).get_epsilon(delta))


class RowAccount(Account):
    """The account of the silo that pays most for noise on rows; `steps` counts noised steps after 1, 2, … rounds."""

    mechanism = "dp-sgd"

    def __init__(self, multiplier: float, rate: float, steps: list[int], delta: float) -> None:
        super().__init__(delta)
        self.multiplier, self._rate, self._steps = multiplier, rate, steps

    @override
    def total(self, times: int) -> float:
        return row_epsilon(self.multiplier, self.delta, self._rate, self._steps[times - 1]) if times else 0.0


MOST_ORDERS = 8
"""Rényi orders of a filter; δ is divided among them."""

_ORDERS = (1.3, 1.6, 2.0, 2.5, 3.2, 4.0, 6.0, 12.0)
"""Orders of a filter, as multiples of ln(8/δ)/ε above 1; Gaussian noise that uses the budget up is best near 2."""


@lru_cache
def renyi_cost(multiplier: float, rate: float, order: float) -> float:
    """Return the Rényi divergence of one step at an order α > 1; infinite without noise."""
    if multiplier == 0:
        return math.inf
    dp = import_dp_accounting()
    accountant = dp.rdp.RdpAccountant([order], dp.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(_event(multiplier, rate, 1))
    return float(accountant._rdp[0])  # the library shows ε alone


@dataclass(frozen=True)
class RenyiFilter:
    """Decide which steps a budget allows, although each step's noise may be chosen after earlier answers were seen.

    Costs ρ(α) of steps add up at each order. Steps are within (ε, δ) as long as Σρ(α) + ln(8/δ)/(α−1) ≤ ε at one of
    the at most 8 orders, which are fixed beforehand (Feldman and Zrnic 2021; Lécuyer 2021).
    """

    epsilon: float
    delta: float
    orders: tuple[float, ...]

    @classmethod
    def of(cls, epsilon: float, delta: float) -> RenyiFilter:
        """Return the filter of a new budget, with the orders that are best for it."""
        return cls(epsilon, delta, tuple(1 + factor * math.log(MOST_ORDERS / delta) / epsilon for factor in _ORDERS))

    def costs(self, multiplier: float, rate: float, steps: int) -> list[float]:
        """Return the Rényi cost of a number of steps at each order."""
        return [steps * renyi_cost(multiplier, rate, order) if steps else 0.0 for order in self.orders]

    def spent(self, costs: Sequence[float]) -> float:
        """Return the smallest ε that covers these costs; 0 without any."""
        added = math.log(MOST_ORDERS / self.delta)
        return (
            min(cost + added / (order - 1) for cost, order in zip(costs, self.orders, strict=True)) if any(costs) else 0
        )

    def allows(self, costs: Sequence[float]) -> bool:
        """Return whether these costs are within the budget."""
        return self.spent(costs) <= self.epsilon

    def least_multiplier(self, before: Sequence[float], rate: float, steps: int) -> float | None:
        """Return the smallest noise with which so many more steps fit into the budget; None if no noise is enough.

        `before` has the costs so far, at each order.
        """

        def fits(multiplier: float) -> bool:
            more = self.costs(multiplier, rate, steps)
            return self.allows([one + other for one, other in zip(before, more, strict=True)])

        low, high = 0.0, 1.0
        while not fits(high):
            if high > _LARGEST_MULTIPLIER:
                return None
            low, high = high, 2 * high
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high


_LITTLE, _LARGEST_MULTIPLIER = 0.1, 2.0**12
"""The search for the least noise ends below the first, and finds none above the second."""

_CLOSE = 1e-3
"""Relative distance to the least noise at which the search ends."""
