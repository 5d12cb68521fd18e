"""The attacks of `python -m benchmarks leakage` find what they look for where nothing protects a silo's rows."""

from __future__ import annotations

import pytest

from benchmarks.leakage import ATTACKS, last_batch, least_squares, measure, two_runs
from benchmarks.leakage.one_silo import SETTING

WORDS = [word for word in SETTING if not word.startswith(("method=", "data.tasks"))]


def test_attacks_are_listed():
    assert measure(list=True) == ATTACKS


def test_the_difference_of_two_runs_is_a_batch(tiny_federation):
    found = two_runs.attack(*(tiny_federation("fedavg", *WORDS, f"train.steps={steps}") for steps in (5, 6)), 60)
    assert found["cosine"] > 0.9


def test_a_last_batch_of_one_row_tells_it(tiny_federation):
    found = last_batch.attack(tiny_federation("fedavg", *WORDS, "train.steps="), 57, 6)
    assert found["least cosine"] > 0.9


@pytest.mark.long
def test_known_orders_tell_rows_and_a_secret_one_does_not(tiny_federation):
    known = tiny_federation("fedavg", *WORDS, "train.steps=")
    secret = tiny_federation("fedavg", *WORDS, "train.steps=")
    secret.context.draw_seed = 7
    assert least_squares.attack(known, 60, 120)["median cosine"] > 0.9
    assert least_squares.attack(secret, 60, 120)["median cosine"] < 0.3
