"""The cost of noise on rows: dp-accounting's numbers, and the least noise that meets a target."""

from __future__ import annotations

import math

import dp_accounting as dp
import dp_accounting.pld
import dp_accounting.rdp
import pytest

from silotune.communication.privacy.row_accountant import (
    RenyiFilter,
    RowAccount,
    noise_multiplier,
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


def test_a_filter_is_its_formula() -> None:
    filter = RenyiFilter.of(2.0, DELTA)
    assert len(filter.orders) == 8
    relation = dp.NeighboringRelation.REPLACE_SPECIAL
    accountant = dp.rdp.RdpAccountant(filter.orders, relation)
    accountant.compose(dp.PoissonSampledDpEvent(RATE, dp.GaussianDpEvent(1.5)), STEPS)
    accountant.compose(dp.GaussianDpEvent(4.0), 2)
    costs = [a + b for a, b in zip(filter.costs(1.5, RATE, STEPS), filter.costs(4.0, 1.0, 2), strict=True)]
    assert costs == pytest.approx(list(accountant._rdp), rel=1e-12)
    added = [math.log(8 / DELTA) / (order - 1) for order in filter.orders]
    assert filter.spent(costs) == pytest.approx(min(map(sum, zip(costs, added, strict=True))))
    assert filter.allows(costs) == (filter.spent(costs) <= 2.0)
    assert renyi_cost(4.0, 1.0, 3.0) == pytest.approx(3.0 / (2 * 4.0**2))  # Gaussian noise: α/(2σ²)
    assert renyi_cost(0.0, RATE, 3.0) == math.inf


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 8.0])
def test_a_filters_least_noise_uses_the_budget_up(epsilon: float) -> None:
    """It costs little more than the exact account of a plan that is known beforehand."""
    filter, none = RenyiFilter.of(epsilon, DELTA), [0.0] * 8
    least = filter.least_multiplier(none, RATE, STEPS)
    assert least is not None
    assert filter.allows(filter.costs(least, RATE, STEPS))
    assert not filter.allows(filter.costs(0.99 * least, RATE, STEPS))
    exact = noise_multiplier(epsilon, DELTA, RATE, STEPS)
    assert exact < least < 1.6 * exact
    half = filter.costs(least, RATE, STEPS)
    assert filter.least_multiplier(half, RATE, STEPS) is None or filter.least_multiplier(half, RATE, STEPS) > 3 * least


def test_units_that_are_hardly_ever_drawn_need_no_noise_to_speak_of() -> None:
    """δ alone covers them, however little noise there is."""
    found = noise_multiplier(4.0, 1e-2, 1e-3, 1)
    assert 0 < found < 0.1
    assert row_epsilon(found, 1e-2, 1e-3, 1) <= 4.0
