"""Choose how often and with which probability a run under noise on rows draws a unit (`silotune privacy`).

The mean of a run's T noised gradients has the noise σ·C / (q·√T·N) for N units, the bound C and the rate q; σ grows
with q and T. The number σ / (q·√T) compares plans whatever N is. Large rates win: with q = 1 it is that of one Gaussian
sum at the same ε, and no plan is below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from silotune.communication.privacy.row_accountant import noise_multiplier

RATES, STEPS = (0.05, 0.1, 0.25, 0.5), (20, 40, 60, 120)
"""What is tried. Fewer steps than the first number do not train a head."""

_NEAR = 1.15
"""A plan is good enough within this factor of the least noise."""


@dataclass(frozen=True)
class StepPlan:
    """So many noised steps, each of which draws a unit with the probability `rate`."""

    rate: float
    steps: int
    multiplier: float
    """Standard deviation of a step's noise, in multiples of the clipping bound."""

    @property
    def passes(self) -> float:
        """How often a unit is drawn on average."""
        return self.rate * self.steps

    @property
    def noise(self) -> float:
        """The noise of the mean gradient, in multiples of the bound divided by the number of units."""
        return self.multiplier / (self.rate * math.sqrt(self.steps))

    def head_lr(self, units: int) -> float:
        """Return the learning rate that this plan wants for a head on frozen vectors, with so many units in a silo.

        SGD with momentum 0.9, a bound of 1 and `head.normalize` 3: 0.055 over steps times the noise of the mean
        gradient, at most 0.5. The numbers are of two data sets (docs/results/row-noise.md).
        """
        return min(0.5, 0.055 * units / (self.steps * self.noise))


def step_plans(
    epsilon: float, delta: float, rates: Sequence[float] = RATES, steps: Sequence[int] = STEPS
) -> list[StepPlan]:
    """Return plans that cost (ε, δ), by rate and then by number of steps."""
    return [StepPlan(rate, count, noise_multiplier(epsilon, delta, rate, count)) for rate in rates for count in steps]


def proposed(plans: Sequence[StepPlan]) -> StepPlan:
    """Return the plan of fewest passes whose noise is within 15 % of the least."""
    least = min(plan.noise for plan in plans)
    return min((plan for plan in plans if plan.noise <= _NEAR * least), key=lambda plan: (plan.passes, plan.noise))


EXPECTED: dict[float, dict[int, tuple[float, float]]] = {
    8: {250: (74.7, 80.0), 1000: (80.6, 82.9), 3500: (82.9, 83.5)},
    1: {250: (61.7, 65.6), 1000: (75.4, 80.4), 3500: (80.7, 82.7)},
}
"""ε → units of a silo → accuracy of a head on the untouched backbone, trained alone and by four silos together."""


def expectation(units: int, epsilon: float) -> str:
    """Say what so many units of a silo came to at the plan for a head (docs/results/row-noise.md)."""
    table = EXPECTED[min(EXPECTED, key=lambda each: abs(math.log(each / epsilon)))]
    near = min(table, key=lambda each: abs(math.log(each / units)))
    budget = next(each for each, rows in EXPECTED.items() if rows is table)
    alone, together = table[near]
    return (
        f"SST-2, {near:,} units a silo, ε = {budget:g}: a head on MiniLM alone {alone:g} % correct, with three other "
        f"silos {together:g} % (docs/results/row-noise.md)"
    )
