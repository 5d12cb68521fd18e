"""Scores and losses leave rounded, by the policy's digits and the number of rows."""

from __future__ import annotations

import pytest

from silotune.distributed.silo.coarse_numbers import CoarseNumbers
from tests.support.malicious import ALLOWED


@pytest.mark.parametrize(
    ("digits", "rows", "losses", "left"),
    [
        (None, 10, False, 83.27654321),
        (1, 5000, False, 83.3),
        (1, 999, False, 83.2),  # 500 rows: multiples of 0.2
        (1, 149, False, 83.0),  # 100 rows
        (1, 20, False, 85.0),
        (0, 5000, False, 83.0),
        (1, 10**6, True, 83.28),
        (1, 20, True, 83.3),  # multiples of 0.05
    ],
)
def test_a_score(digits, rows, losses, left):
    coarse = CoarseNumbers(digits, {"validation": rows}, losses)
    assert coarse.scores({"validation": 83.27654321, "rows": {"train": 7}}) == {
        "validation": left,
        "rows": {"train": 7},
    }


def test_a_score_that_is_none_stays_and_so_do_counts():
    coarse = CoarseNumbers(1, {"train": 1000})
    assert coarse.scores({"validation": None, "test": 66.66666}) == {"validation": None, "test": 100.0}  # unknown rows
    metrics = {"loss": 0.123456, "rows": 7, "steps": 3, "skipped_steps": 0, "seconds": 1.2345}
    assert coarse.metrics(metrics) == metrics | {"loss": 0.12}


def test_what_leaves_a_silo(attack):
    """The same request under both policies: exact in a laboratory, multiples of a step elsewhere."""
    share = ["validation", "test", "rows", "loss"]
    left = {}
    for preset in ("lab", "partners"):
        coordinator = attack(ALLOWED, policy={"preset": preset, "scored_rows": 0, "train_rows": 0}, share=share)
        answered = coordinator.ask("round")
        assert answered.kind == "answer", answered.fields
        state = answered.fields["state"]
        scored = coordinator.ask("score", base=state)
        again = coordinator.ask("score", base=state)
        assert scored.fields == again.fields
        left[preset] = (answered.fields["metrics"]["loss"], scored.fields["scores"]["validation"])
    (exact_loss, exact), (loss, score) = left["lab"], left["partners"]
    assert loss != exact_loss
    assert loss == pytest.approx(exact_loss, abs=0.03)
    assert loss == round(loss, 2)
    assert score == pytest.approx(exact, abs=25)
    assert score == round(score, 1)
