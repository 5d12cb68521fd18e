"""Plans of noised steps: the noise of their mean direction, what is proposed, and how a configuration gets its rate."""

from __future__ import annotations

import pytest

from silotune.communication.privacy import plan
from silotune.communication.privacy.accountant import usual_delta
from silotune.communication.privacy.plan import StepPlan, proposed, step_plans
from silotune.communication.privacy.row_accountant import row_epsilon
from silotune.errors import InputError
from silotune.runs.build.resolve import read_config

NOISED = ("method=fedavg", "privacy.unit=row", "privacy.units=2000", "privacy.plan=auto", "rounds=20", "train.steps=1")


@pytest.mark.parametrize(
    ("epsilon", "rate", "steps", "noise"), [(8, 0.016, 16, 6.8), (8, 0.25, 20, 0.90), (1, 0.25, 120, 3.8)]
)
def test_the_noise_of_a_runs_mean_direction(epsilon, rate, steps, noise):
    (made,) = step_plans(epsilon, 1e-5, [rate], [steps])
    assert made.noise == pytest.approx(noise, rel=0.01)
    assert made.passes == pytest.approx(rate * steps)
    assert row_epsilon(made.multiplier, 1e-5, rate, steps) == pytest.approx(epsilon, rel=0.01)


def test_the_fewest_passes_within_15_percent_of_the_least_noise_are_proposed():
    least, near, far, fewer = (
        StepPlan(0.5, 60, 15.0),
        StepPlan(0.5, 20, 8.9),
        StepPlan(0.1, 20, 9.0),
        StepPlan(0.25, 40, 7.0),
    )
    plans = [least, near, far, fewer]
    assert [round(each.noise / least.noise, 2) for each in plans] == [1, 1.03, 5.2, 1.14]
    assert proposed(plans) is near  # both have 10 passes, and it has less noise
    assert proposed(plans[2:]) is fewer


@pytest.mark.parametrize(
    ("made", "units", "best"),
    [
        (StepPlan(0.25, 120, 10.36), 250, (1 / 32, 1 / 32)),
        (StepPlan(0.25, 120, 10.36), 700, (1 / 16, 1 / 16)),
        (StepPlan(0.25, 120, 1.84), 250, (1 / 8, 1 / 8)),
        (StepPlan(0.25, 120, 1.84), 700, (1 / 4, 1 / 2)),
        (StepPlan(0.5, 20, 1.55), 250, (1, 1)),
        (StepPlan(0.5, 20, 1.55), 700, (1, 1)),
        (StepPlan(0.1, 40, 2.68), 250, (1 / 8, 1 / 8)),
        (StepPlan(0.1, 40, 2.68), 700, (1 / 4, 1 / 4)),
    ],
)
def test_the_rate_of_a_head_is_within_a_factor_of_two_of_the_best_of_six(made, units, best):
    """The best on movie snippets and on subjectivity, of 1/32 to 1 (docs/results/row-noise.md)."""
    assert all(rate / 2 <= made.head_lr(units) <= rate * 2 for rate in best)


def test_many_units_want_no_more_than_the_largest_rate():
    assert StepPlan(0.25, 120, 10.36).head_lr(100_000) == 0.5


@pytest.mark.parametrize(("units", "delta"), [(1000, 1e-5), (100_000, 1e-6)])
def test_delta_is_a_tenth_of_a_units_share(units, delta):
    assert usual_delta(units) == pytest.approx(delta)


@pytest.fixture
def quick(monkeypatch):
    """Noise by a formula in the place of privacy losses: small rates need half as much again."""
    monkeypatch.setattr(plan, "noise_multiplier", lambda e, d, q, steps: (4 if q > 0.1 else 6) / e * q * steps**0.5)


def test_whoever_writes_the_configuration_resolves_the_plan(quick):
    config = read_config("demo", [*NOISED, "privacy.epsilon=1"])
    assert (config.privacy.rate, config.privacy.delta) == (0.25, 1e-5)
    assert read_config("demo", [*NOISED, "privacy.epsilon=1", "privacy.rate=0.4"]).privacy.rate == 0.4


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        (["privacy.rate=0.5"], "privacy: rate and plan"),
        (["privacy.unit=row", "privacy.epsilon=1", "privacy.plan=auto"], "privacy.units"),
        ([*NOISED[:-1], "privacy.epsilon=1"], "train.steps"),
    ],
)
def test_plans_that_say_too_little_are_refused(words, culprit):
    with pytest.raises(InputError, match=culprit):
        read_config("demo", words)
