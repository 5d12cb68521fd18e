"""The cost of noise on rows: dp-accounting's numbers, and the least noise that meets a target."""

from __future__ import annotations

import dp_accounting as dp
import dp_accounting.pld
import dp_accounting.rdp
import pytest

from silotune.communication.privacy.row_accountant import RowAccount, noise_multiplier, row_epsilon

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
    assert found == pytest.approx(by_loss)
    assert found < by_renyi


def test_rounds_add_up_by_their_steps() -> None:
    account = RowAccount(1.5, RATE, [10, 10, 50], DELTA)
    assert account.total(0) == 0
    assert account.total(1) == account.total(2) == row_epsilon(1.5, DELTA, RATE, 10)
    assert account.total(3) == row_epsilon(1.5, DELTA, RATE, 50)


def test_without_steps_there_is_no_noise() -> None:
    assert noise_multiplier(1.0, DELTA, RATE, 0) == 0
