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

Event = tuple[float, float, int]
"""Equal noised steps: their noise in multiples of the bound, the probability with which each draws a unit, how many."""

Events = tuple[Event, ...]
"""All noised steps of a run or of an answer, composed as one."""


def scaled(events: Events, factor: float) -> Events:
    """Return steps with their noise multiplied by a factor."""
    return tuple((multiplier * factor, rate, steps) for multiplier, rate, steps in events)


def _event(events: Events) -> Any:
    dp = import_dp_accounting()
    composed = []
    for multiplier, rate, steps in events:
        if not steps:
            continue
        gaussian = dp.GaussianDpEvent(multiplier)
        step = gaussian if rate == 1 else dp.PoissonSampledDpEvent(rate, gaussian)
        composed.append(dp.SelfComposedDpEvent(step, steps))
    return dp.ComposedDpEvent(composed)


_INTERVAL = 1e-3
"""Steps of privacy losses: seven times as fast as the library's own 1e-4, at an ε larger by less than a hundredth."""


@lru_cache(maxsize=16)
def _losses(events: Events) -> Any:
    """Return the accountant of steps; its ε at one δ after another, or δ at one ε, is then quick."""
    dp = import_dp_accounting()
    new = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=_INTERVAL)
    return new.compose(_event(events))


def plan_epsilon(events: Events, delta: float) -> float:
    """Return the ε that steps cost together at δ, by privacy loss distributions; they are planned beforehand."""
    return float(_losses(events).get_epsilon(delta))


def plan_delta(events: Events, epsilon: float) -> float:
    """Return the δ of steps at ε, which says in less time than `plan_epsilon` whether they keep to (ε, δ)."""
    return float(_losses(events).get_delta(epsilon))


def row_epsilon(multiplier: float, delta: float, rate: float, steps: int) -> float:
    """Return the ε of equal steps; arguments as of `plan_epsilon`."""
    return plan_epsilon(((multiplier, rate, steps),), delta)


def noise_multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the smallest noise, in multiples of the clipping bound, with which so many steps cost at most (ε, δ).

    A step draws each unit with the probability `rate`; 0 steps need no noise.
    """
    if steps == 0:
        return 0.0
    if (multiplier := least_scale(epsilon, delta, ((1.0, rate, steps),))) is None:
        raise InputError(f"privacy.epsilon: ε = {epsilon:g} is too little for {steps} steps")
    return multiplier


@lru_cache
def least_scale(epsilon: float, delta: float, events: Events) -> float | None:
    """Return the smallest factor on the noise of planned steps that makes them cost at most (ε, δ); None: none does."""
    from scipy.optimize import brentq

    enough = RenyiFilter.of(epsilon, delta).least_scale([0.0] * MOST_ORDERS, events)
    if enough is None:
        return None
    little = enough / 2
    while plan_epsilon(scaled(events, little), delta) <= epsilon:
        if little < _LITTLE:  # δ alone may cover units that are hardly ever drawn
            return little
        enough, little = little, little / 2

    def excess(logarithm: float) -> float:  # nearly a line, so that few evaluations find its zero
        return math.log(max(plan_epsilon(scaled(events, math.exp(logarithm)), delta), 1e-9) / epsilon)

    factor = math.exp(brentq(excess, math.log(little), math.log(enough), xtol=_CLOSE / 4))
    while plan_epsilon(scaled(events, factor), delta) > epsilon:
        factor *= 1 + _CLOSE / 4
    return factor


UNCOVERED = "users of a silo's own model"
"""Whom the account of noise on rows does not cover, unless all parts have noise."""

SIMULATED = "whoever knows the run's seed, from which a simulation draws the noise"
"""Whom noise in one process does not hide rows from."""


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


@lru_cache(maxsize=4096)
def renyi_cost(multiplier: float, rate: float, order: float) -> float:
    """Return the Rényi divergence of one step at an order α > 1; infinite without noise."""
    if multiplier == 0:
        return math.inf
    dp = import_dp_accounting()
    accountant = dp.rdp.RdpAccountant([order], dp.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(_event(((multiplier, rate, 1),)))
    return float(accountant._rdp[0])  # the library shows ε alone


@dataclass(frozen=True)
class RenyiFilter:
    """Decide which steps (ε, δ) allow, although each step's noise may be chosen after earlier answers were seen.

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

    def costs(self, events: Events) -> list[float]:
        """Return the Rényi cost of steps at each order."""
        steps = [event for event in events if event[-1]]
        return [math.fsum(count * renyi_cost(*step, order) for *step, count in steps) for order in self.orders]

    def spent(self, costs: Sequence[float]) -> float:
        """Return the smallest ε that covers these costs; 0 without any."""
        added = math.log(MOST_ORDERS / self.delta)
        return (
            min(cost + added / (order - 1) for cost, order in zip(costs, self.orders, strict=True)) if any(costs) else 0
        )

    def least_scale(self, before: Sequence[float], events: Events) -> float | None:
        """Return the smallest factor on the noise of more steps with which they fit; None if no noise is enough.

        `before` has the costs so far, at each order.
        """

        def fits(factor: float) -> bool:
            more = self.costs(scaled(events, factor))
            return self.spent([one + other for one, other in zip(before, more, strict=True)]) <= self.epsilon

        low, high = 0.0, 1.0
        while not fits(high):
            if high > _LARGEST_SCALE:
                return None
            low, high = high, 2 * high
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high


@dataclass(frozen=True)
class RunFilter:
    """Decide which whole runs fit, by plain composition: Σε′ ≤ ε, where a run of ε′ has the share δ·ε′/ε of δ.

    A run's steps are planned before its first answer, so that their privacy loss distributions give its cost.
    """

    epsilon: float
    delta: float

    def cost(self, events: Events, most: float) -> float:
        """Return a run's ε′, the least that covers its planned steps at its share of δ; infinite above `most`."""
        if not any(steps for *_, steps in events):
            return 0.0
        low, high = 0.0, most
        if not self._covers(most, events):
            return math.inf
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._covers(middle, events) else (middle, high)
        return high

    def least_scale(self, most: float, events: Events) -> float | None:
        """Return a factor on the noise of a run with which it costs at most so much, near the least; None: none."""
        return least_scale(most, self.delta * most / self.epsilon, events) if most > 0 else None

    def _covers(self, epsilon: float, events: Events) -> bool:
        return epsilon > 0 and plan_delta(events, epsilon) <= self.delta * epsilon / self.epsilon


@dataclass(frozen=True)
class Costs:
    """What all answers and reservations of a unit cost: at each order of the first filter, and in the second."""

    renyi: Sequence[float]
    runs: float


@dataclass(frozen=True)
class RowFilters:
    """Keep a budget of (ε, δ) for all runs by two filters of (ε, δ/2), of which one has to allow each answer.

    `steps` composes all steps, whatever is asked for. `runs` composes whole runs: a run costs all its planned steps
    from its first answer on, though it may be abandoned, and an answer beyond its plan costs infinitely much. The
    second lets the usual single run have nearly the noise of the exact account; None: a ledger from before.

    Why (ε, δ) holds. An adversary chooses requests, runs and their plans after it has seen earlier answers; costs are
    a function of what it has seen (multipliers, rates, steps, the number of units), and never decrease.

    1. Both filters count every answer. So if the costs at the end satisfy one of them, they always did, and the
       transcript is one that this filter alone would have let through. Let A be the transcripts that satisfy the first
       at their end, and B those that satisfy the second and not the first. All transcripts are in A or in B.
    2. The mechanism that only the first filter stops is (ε, δ/2) (`RenyiFilter`), and has the same probability of each
       transcript in A. The same holds for the second and B, by 3. For a set S of transcripts under neighbors P and Q:
       P(S) = P(S ∩ A) + P(S ∩ B) ≤ e^ε·Q(S ∩ A) + δ/2 + e^ε·Q(S ∩ B) + δ/2 = e^ε·Q(S) + δ.
    3. A run is an interactive mechanism: at most so many steps of each planned kind, in any order and on any tensors
       that the adversary likes. Its kinds compose concurrently, as do runs, which may overlap: privacy loss
       distributions bound one run at (ε′, δ·ε′/2ε) (Vadhan and Zhang 2023), and a filter that holds for mechanisms in
       sequence, here plain composition (Rogers et al. 2016), holds for concurrent ones whose parameters
       are chosen as they begin (Haney et al. 2023).

    Assumed: ε, δ, and the orders are fixed before the first answer; the draws of different answers are independent;
    the noise is exactly Gaussian; units are the same in all runs, and how many there are is public.
    """

    steps: RenyiFilter
    runs: RunFilter | None
    limit: float
    """The ε of all runs together in the second filter."""

    @classmethod
    def of(cls, epsilon: float, delta: float) -> RowFilters:
        """Return the filters of a new budget."""
        return cls(RenyiFilter.of(epsilon, delta / 2), RunFilter(epsilon, delta / 2), epsilon)

    def left(self, costs: Costs) -> float:
        """Return the ε that is left in the second filter, rounded down; negative if it allows nothing more."""
        return -math.inf if self.runs is None else (self.limit - costs.runs) * (1 - 1e-12)

    def spent(self, costs: Costs) -> float:
        """Return the smallest ε that covers these costs."""
        return min(self.steps.spent(costs.renyi), costs.runs if self.runs is not None else math.inf)

    def allows(self, costs: Costs) -> bool:
        """Return whether these costs are within the budget."""
        by_runs = self.runs is not None and costs.runs <= self.limit
        return by_runs or self.steps.spent(costs.renyi) <= self.steps.epsilon

    def least_scale(self, costs: Costs, events: Events) -> float | None:
        """Return the smallest factor of at least 1 on a new run's noise with which it fits; None if none is enough."""
        epsilon = self.left(costs)
        if self.runs is not None and epsilon > 0 and self.runs.cost(events, epsilon) <= epsilon:
            return 1.0
        factors = [self.steps.least_scale(costs.renyi, events)]
        if self.runs is not None and (factors[0] or math.inf) > 1 and epsilon > _CLOSE * self.limit:
            factors.append(self.runs.least_scale(epsilon, events))
        scales = [factor for factor in factors if factor is not None]
        return max(1.0, min(scales)) if scales else None


_LITTLE, _LARGEST_SCALE = 0.1, 2.0**12
"""The search for the least noise ends below the first, and finds none above the second."""

_CLOSE = 1e-3
"""Relative distance to the least noise at which the search ends."""
