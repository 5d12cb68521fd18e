"""Scores and losses leave rounded, by the policy's digits and the number of rows."""

from __future__ import annotations

import itertools

import pytest
import torch

from silotune.config import Config
from silotune.data.scores import METRICS, Classified
from silotune.data.tasks import Task
from silotune.distributed.silo.coarse_numbers import CoarseNumbers
from silotune.distributed.silo.score_sensitivity import rows_behind
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
    coarse = CoarseNumbers(digits, {"validation": rows}, ["validation"] if losses else [])
    assert coarse.scores({"validation": 83.27654321, "rows": {"train": 7}}) == {
        "validation": left,
        "rows": {"train": 7},
    }


def test_a_score_that_is_none_stays_and_so_do_counts():
    coarse = CoarseNumbers(1, {"train": 1000})
    assert coarse.scores({"validation": None, "test": 66.66666}) == {"validation": None, "test": 100.0}  # unknown rows
    metrics = {"loss": 0.123456, "rows": 7, "steps": 3, "skipped_steps": 0, "seconds": 1.2345}
    assert coarse.metrics(metrics) == metrics | {"loss": 0.12, "seconds": 1.2}


def test_what_leaves_a_silo(attack):
    """The same request under both policies: exact in a laboratory, multiples of a step elsewhere."""
    share = ["validation", "test", "rows", "loss"]
    left = {}
    for preset in ("lab", "partners"):
        coordinator = attack(
            ALLOWED, policy={"preset": preset, "scored_rows": 0, "train_rows": 0, "score_noise": 0}, share=share
        )
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


def test_a_loss_for_validation_makes_the_test_score_no_finer(attack, monkeypatch):
    """Heads that write are validated by their loss, and tested in percent."""
    monkeypatch.setattr(Config, "validates_by_loss", True)
    coordinator = attack(ALLOWED, policy={"score_noise": 0})
    scores = coordinator.ask("score", splits=["validation", "test"]).fields["scores"]
    assert scores["test"] % 5 == 0  # 20 rows
    assert scores["test"] > 1


def test_scores_are_noised_by_a_secret_of_the_silo(attack):
    """Without noise, two scores tell whether a guessed row is in the split. A repeated request tells nothing new."""
    coordinator = attack((*ALLOWED, "rounds=20"))
    asked = [coordinator.broadcast(1, add=1e-7 * number) for number in range(40)]
    scores = [coordinator.ask("score", broadcast=each).fields["scores"]["validation"] for each in asked]
    assert len(set(scores)) > 2
    assert all(0 <= score <= 100 and score % 5 == 0 for score in scores)
    coordinator.restart()
    assert coordinator.ask("score", broadcast=asked[-1]).fields["scores"]["validation"] == scores[-1]
    exact = attack((*ALLOWED, "rounds=20"), policy={"score_noise": 0}, run="b" * 16)
    assert len({exact.ask("score", broadcast=each).fields["scores"]["validation"] for each in asked[:3]}) == 1


def test_noise_of_as_many_rows():
    drawn = [
        CoarseNumbers(9, {"test": 100}, noise=2.0, drawn_for=(1, str(draw))).scores({"test": 50.0})["test"] - 50
        for draw in range(2000)
    ]
    assert sum(map(abs, drawn)) / len(drawn) == pytest.approx(2, rel=0.1)
    assert abs(sum(drawn) / len(drawn)) < 0.3
    signed = CoarseNumbers(9, {"test": 1}, noise=50.0, least=-100)
    assert -100 <= signed.scores({"test": -99.0})["test"] <= 100


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("counts", [(40, 10), (3, 47), (25, 25), (30, 15, 5)])
def test_no_row_changes_a_score_by_more_than_its_noise(metric, counts):
    """A model that answers one text otherwise than it answers all others, or than it answers the rest of its label."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    names = tuple(f"label {index}" for index in range(len(counts)))
    task = Task("task", names, metric, positive=names[-1] if metric == "f1" else "")
    if metric == "auroc" and len(counts) > 2:
        pytest.skip("a mean over classes, each of which is one of the others")

    def score(answers):
        logits = torch.nn.functional.one_hot(answers, len(counts)).float()
        return METRICS[metric](Classified(logits, labels, task.positive_index)) or 0.0

    models = [torch.full_like(labels, constant) for constant in range(len(counts))] + [labels.clone()]
    largest = 0.0
    for model, label in itertools.product(models, range(len(counts))):
        row = int((labels == label).nonzero()[0])
        for answer in range(len(counts)):
            changed = model.clone()
            changed[row] = answer
            largest = max(largest, abs(score(changed) - score(model)))
    assert largest <= 100 / rows_behind(task, labels) + 1e-9
    assert largest >= 100 / rows_behind(task, labels) / 6  # no more noise than is needed


@pytest.mark.parametrize(
    ("metric", "kind", "labels", "behind"),
    [
        ("micro_f1", "multilabel", [[1.0, 0], [1, 1], [1, 0], [1, 0], [0, 0]], 2),
        ("auroc", "multilabel", [[1.0, 0], [1, 1], [1, 0], [1, 0], [0, 0]], 1),
        ("pearson", "regression", [0.5] * 100, 10),
        ("mse", "regression", [0.5] * 100, 100),
        ("mcc", "", [0] * 96 + [1] * 4, 2),
        ("balanced_accuracy", "", [0] * 5, 5),
        ("accuracy", "", [], 1),
    ],
)
def test_rows_behind_a_score(metric, kind, labels, behind):
    task = Task("task", () if kind == "regression" else ("no", "yes"), metric, **({"kind": kind} if kind else {}))
    assert rows_behind(task, torch.tensor(labels, dtype=None if kind else torch.int64)) == behind


def test_noise_is_that_of_the_rows_behind_a_score():
    def drawn(behind):
        coarse = CoarseNumbers(None, {"test": 100}, noise=1.0, behind=behind, drawn_for=(1, "a"))
        return coarse.scores({"test": 50.0})["test"] - 50

    assert drawn({"test": 10}) == pytest.approx(10 * drawn({}), abs=1e-6)
