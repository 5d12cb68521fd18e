"""ε and δ against the library at the same parameters, and against closed forms where there are some."""

from __future__ import annotations

import math
from functools import cache

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from silotune.communication.privacy.accountant import (
    Account,
    CentralAccount,
    GaussianAccount,
    LaplaceAccount,
    SampledCentralAccount,
    affordable_uses,
    gaussian_epsilon,
    gaussian_multiplier,
)


def gaussian_delta(multiplier: float, epsilon: float) -> float:
    """Balle and Wang 2018, Theorem 8, for a sensitivity of 1."""
    a, b = 1 / (2 * multiplier), epsilon * multiplier
    return float(stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b))


# -- Laplace ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0, 1, 3, 50])
def test_pure_laplace_adds_up(times):
    assert LaplaceAccount(0.7).total(times) == pytest.approx(0.7 * times)


def test_one_laplace_round_at_a_delta_is_the_closed_form():
    """`δ(ε') = 1 − e^((ε' − ε)/2)`, so `ε' = ε + 2·ln(1 − δ)`."""
    for epsilon, delta in ((1.0, 0.1), (2.0, 0.05), (8.0, 0.01)):
        expected = epsilon + 2 * math.log(1 - delta)
        assert LaplaceAccount(epsilon, delta).total(1) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(("epsilon", "times", "delta"), [(0.5, 10, 1e-5), (0.1, 100, 1e-6), (2.0, 5, 1e-5)])
def test_laplace_rounds_at_a_delta_are_the_librarys(epsilon, times, delta):
    accountant = pld.PLDAccountant()
    accountant.compose(dp_accounting.LaplaceDpEvent(1 / epsilon), times)
    expected = min(accountant.get_epsilon(delta), times * epsilon)
    assert LaplaceAccount(epsilon, delta).total(times) == pytest.approx(expected, rel=1e-3)


def test_many_laplace_rounds_cost_less_than_their_sum_at_a_delta():
    assert LaplaceAccount(0.1, 1e-6).total(100) < 0.75 * 10
    assert LaplaceAccount(8.0, 1e-5).total(20) <= 160


@pytest.mark.parametrize("split", [(0.5, 0.5), (0.9, 0.1), (0.4, 0.3, 0.2, 0.1), (0.05,) * 20])
@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_a_change_over_many_numbers_is_never_easier_to_tell_than_one_of_the_same_l1_norm(split, epsilon):
    """The accountant takes the whole L1 sensitivity to be in one number. Two of shifts a and b: with u = a + b − ε',
    δ is at most `1 − e^(−u/2) − (u/4)·e^(−u/2)`, one of shift a + b has `1 − e^(−u/2)`."""

    @cache
    def loss(shift: float):
        return privacy_loss_distribution.from_laplace_mechanism(
            1 / (shift * epsilon), value_discretization_interval=1e-4
        )

    spread = loss(split[0])
    for shift in split[1:]:
        spread = spread.compose(loss(shift))
    for other in [x * epsilon for x in (0.0, 0.2, 0.5, 0.8, 0.95)]:
        whole = 1 - math.exp((other - epsilon) / 2)
        assert spread.get_delta_for_epsilon(other) <= whole + 1e-4


# -- Gaussian ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.3, 2.0, 8.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_gaussian_multiplier_is_the_smallest_that_keeps_the_promise(epsilon, delta):
    multiplier = gaussian_multiplier(epsilon, delta)
    assert gaussian_delta(multiplier, epsilon) == pytest.approx(delta, rel=1e-4)
    assert gaussian_delta(0.99 * multiplier, epsilon) > delta
    assert gaussian_epsilon(multiplier, delta) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize("times", [1, 4, 25])
def test_gaussian_rounds_are_the_closed_form_and_the_librarys(times):
    """k independent numbers of the same shift have together a shift larger by √k."""
    account = GaussianAccount(3.0, 1e-5)
    found = account.total(times)
    assert gaussian_delta(3.0 / math.sqrt(times), found) == pytest.approx(1e-5, rel=1e-4)
    accountant = pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(3.0), times)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert account.total(0) == 0


# -- central ----------------------------------------------------------------------------------------------------------


def test_without_sampling_the_central_account_is_the_gaussian_one():
    for times in (1, 7):
        plain = GaussianAccount(2.0, 1e-5).total(times)
        assert SampledCentralAccount(2.0, 1e-5, 10, 10).total(times) == CentralAccount(2.0, 1e-5).total(times) == plain


def test_sampling_is_accounted_as_in_the_library_and_helps():
    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.GaussianDpEvent(2.0)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(100, 5, event), 50)
    found = SampledCentralAccount(2.0, 1e-5, 100, 5).total(50)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    assert found < GaussianAccount(2.0, 1e-5).total(50)


def test_where_sampling_is_bounded_too_loosely_the_plain_bound_counts():
    account = SampledCentralAccount(1.0, 1e-5, 4, 3)
    assert account.total(3) <= GaussianAccount(1.0, 1e-5).total(3)


# -- how long a budget lasts ------------------------------------------------------------------------------------------


ACCOUNTS = [
    LaplaceAccount(0.1),
    LaplaceAccount(0.1, 1e-5),
    GaussianAccount(5.0, 1e-5),
    SampledCentralAccount(2.0, 1e-5, 50, 5),
]


@pytest.mark.parametrize("account", ACCOUNTS, ids=lambda account: account.mechanism)
def test_a_budget_lasts_for_as_many_uses_as_cost_no_more(account: Account):
    most = 5 if isinstance(account, SampledCentralAccount) else 20  # its library takes a second each
    totals = [account.total(times) for times in range(most + 1)]
    assert totals == sorted(totals)
    for budget in (totals[1] / 2, totals[1], totals[4], (totals[4] + totals[5]) / 2, totals[most] * 2):
        expected = max(times for times in range(most + 1) if totals[times] <= budget * (1 + 1e-9))
        assert affordable_uses(account, budget, most) == expected
    assert affordable_uses(LaplaceAccount(0.1), 0.3, 10) == 3
