"""The cost of noise on rows: dp-accounting's numbers, and the least noise that meets a target."""

from __future__ import annotations

import math

import dp_accounting as dp
import dp_accounting.pld
import dp_accounting.rdp
import numpy as np
import pytest
from scipy.stats import norm

from silotune.communication.privacy.row_accountant import (
    Costs,
    Events,
    RenyiFilter,
    RowAccount,
    RowFilters,
    noise_multiplier,
    plan_delta,
    plan_epsilon,
    renyi_cost,
    row_epsilon,
)

RATE, STEPS, DELTA = 0.1, 50, 1e-5


def test_the_noise_is_the_least_for_the_target() -> None:
    multiplier = noise_multiplier(2.0, DELTA, RATE, STEPS)
    assert row_epsilon(multiplier, DELTA, RATE, STEPS) <= 2.0
    assert row_epsilon(multiplier * 0.98, DELTA, RATE, STEPS) > 2.0


def test_epsilon_is_the_librarys_and_below_its_renyi_bound() -> None:
    relation = dp.NeighboringRelation.REPLACE_SPECIAL
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(RATE, dp.GaussianDpEvent(1.5)), STEPS)
    by_loss = dp.pld.PLDAccountant(relation).compose(event).get_epsilon(DELTA)
    by_renyi = dp.rdp.RdpAccountant(neighboring_relation=relation).compose(event).get_epsilon(DELTA)
    found = row_epsilon(1.5, DELTA, RATE, STEPS)
    assert found == pytest.approx(by_loss, rel=1e-3)
    assert found < by_renyi


def test_rounds_add_up_by_their_steps() -> None:
    account = RowAccount(1.5, RATE, [10, 10, 50], DELTA)
    assert account.total(0) == 0
    assert account.total(1) == account.total(2) == row_epsilon(1.5, DELTA, RATE, 10)
    assert account.total(3) == row_epsilon(1.5, DELTA, RATE, 50)


def test_without_steps_there_is_no_noise() -> None:
    assert noise_multiplier(1.0, DELTA, RATE, 0) == 0


def test_the_first_filter_is_its_formula() -> None:
    """Of (ε, δ/2), so that each of the eight orders has δ/16."""
    filters = RowFilters.of(2.0, DELTA)
    steps = filters.steps
    assert len(steps.orders) == 8
    relation = dp.NeighboringRelation.REPLACE_SPECIAL
    accountant = dp.rdp.RdpAccountant(steps.orders, relation)
    accountant.compose(dp.PoissonSampledDpEvent(RATE, dp.GaussianDpEvent(1.5)), STEPS)
    accountant.compose(dp.GaussianDpEvent(4.0), 2)
    costs = steps.costs(((1.5, RATE, STEPS), (4.0, 1.0, 2)))
    assert costs == pytest.approx(list(accountant._rdp), rel=1e-12)
    added = [math.log(16 / DELTA) / (order - 1) for order in steps.orders]
    spent = min(map(sum, zip(costs, added, strict=True)))
    assert steps.spent(costs) == filters.spent(Costs(costs, math.inf)) == pytest.approx(spent)
    assert filters.allows(Costs(costs, math.inf)) == (spent <= 2.0)
    assert renyi_cost(4.0, 1.0, 3.0) == pytest.approx(3.0 / (2 * 4.0**2))  # Gaussian noise: α/(2σ²)
    assert renyi_cost(0.0, RATE, 3.0) == math.inf


def own_delta(events: Events, epsilon: float) -> float:
    """Return the δ of steps at ε by an own convolution (FFT) of the losses of both directions, rounded up to a grid."""
    size, deltas = 1 << 18, []
    losses = (np.arange(size) - size // 2) * 1e-4
    for added in (True, False):
        transform = np.ones(size, dtype=complex)
        for noise, rate, steps in events:
            x = np.linspace(-14 * noise, 14 * noise + 1, 400_001)
            without, drawn = norm.pdf(x, 0, noise), norm.pdf(x, 1, noise)
            pair = (1 - rate) * without + rate * drawn, without
            p, q = pair if added else pair[::-1]
            places = np.ceil(np.log(p / q) / 1e-4).astype(int) + size // 2
            mass = np.bincount(np.clip(places, 0, size - 1), weights=p * (x[1] - x[0]), minlength=size)
            transform *= np.fft.fft(np.fft.ifftshift(mass)) ** steps
        chances = np.fft.fftshift(np.fft.ifft(transform).real)
        deltas.append(float(np.sum(np.where(losses > epsilon, (1 - np.exp(epsilon - losses)) * chances, 0))))
    return max(deltas)


MIXED = ((2.0, 0.1, 20), (3.0, 0.3, 4))


@pytest.mark.parametrize("events", [((1.0, 0.02, 50),), ((4.0, 0.5, 8),), MIXED])
def test_epsilon_and_a_runs_cost_by_an_own_convolution(events: Events) -> None:
    assert own_delta(events, plan_epsilon(events, DELTA)) == pytest.approx(DELTA, rel=0.03)
    assert plan_delta(events, plan_epsilon(events, DELTA)) == pytest.approx(DELTA, rel=1e-6)
    filters = RowFilters.of(4.0, DELTA)
    assert filters.runs is not None
    cost = filters.runs.cost(events, 4.0)
    share = DELTA / 2 * cost / 4.0
    assert own_delta(events, cost) <= 1.02 * share < own_delta(events, 0.98 * cost)
    assert filters.runs.cost(events, 0.99 * cost) == math.inf
    assert filters.spent(Costs([math.inf] * 8, 2 * cost)) == 2 * cost
    assert filters.allows(Costs([math.inf] * 8, 4.0))
    assert not filters.allows(Costs([math.inf] * 8, 4.001))


@pytest.mark.parametrize(
    ("epsilon", "rate", "steps"),
    [
        (1.0, 0.1, 100),
        pytest.param(1.0, 0.016, 16, marks=pytest.mark.long),
        pytest.param(8.0, 0.016, 16, marks=pytest.mark.long),
    ],
)
def test_a_first_run_has_nearly_the_noise_of_the_exact_account(epsilon: float, rate: float, steps: int) -> None:
    exact, nothing = noise_multiplier(epsilon, DELTA, rate, steps), Costs([0.0] * 8, 0.0)
    filters = RowFilters.of(epsilon, DELTA)
    scale = filters.least_scale(nothing, ((exact, rate, steps),))
    assert scale is not None
    assert 1 < scale < 1.045
    assert filters.runs is not None
    assert filters.runs.cost(((exact * scale, rate, steps),), epsilon) <= epsilon
    first = filters.steps.least_scale(nothing.renyi, ((exact, rate, steps),))
    assert first is not None
    assert first > 1.2, "the first filter alone asks for more"


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 8.0])
def test_a_filters_least_noise_uses_the_budget_up(epsilon: float) -> None:
    filter, none = RenyiFilter.of(epsilon, DELTA), [0.0] * 8
    least = filter.least_scale(none, ((1.0, RATE, STEPS),))
    assert least is not None
    assert filter.spent(filter.costs(((least, RATE, STEPS),))) <= epsilon
    assert filter.spent(filter.costs(((0.99 * least, RATE, STEPS),))) > epsilon
    assert least < 1.6 * noise_multiplier(epsilon, DELTA, RATE, STEPS)
    more = filter.least_scale(filter.costs(((least, RATE, STEPS),)), ((1.0, RATE, STEPS),))
    assert more is None or more > 3 * least


def test_units_that_are_hardly_ever_drawn_need_no_noise_to_speak_of() -> None:
    """δ alone covers them, however little noise there is."""
    found = noise_multiplier(4.0, 1e-2, 1e-3, 1)
    assert 0 < found < 0.1
    assert row_epsilon(found, 1e-2, 1e-3, 1) <= 4.0
