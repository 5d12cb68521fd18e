"""Baselines: learned from a silo's training rows, by the task's own metric, and beside every table."""

from __future__ import annotations

import pytest

from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.evaluation import baselines as module
from silotune.evaluation.baselines import baseline_scores, baselines

MOOD = Task("mood", ("bad", "good"))


def rows(*texts: tuple[str, int]) -> list[Row]:
    return [Row((text,), label) for text, label in texts]


TRAIN = rows(("a warm day", 1), ("warm and kind", 1), ("so warm", 1), ("cold and rude", 0), ("a cold day", 0)) * 6
TEST = rows(("warm again", 1), ("cold again", 0), ("a cold river", 0))


def test_words_that_tell_the_label_are_found():
    scores = baseline_scores(MOOD, TRAIN, TEST)
    assert scores == {"majority": pytest.approx(100 / 3), "bag_of_words": 100.0}  # the training rows' majority: good


def test_the_metric_is_the_tasks():
    scores = baseline_scores(Task("mood", ("bad", "good"), "macro_f1"), TRAIN, TEST)
    assert scores["majority"] == pytest.approx(100 * (2 / 4) / 2)
    assert baseline_scores(Task("mood", ("bad", "good"), "f1", positive="bad"), TRAIN, TEST)["majority"] == 0.0
    assert baseline_scores(Task("mood", ("bad", "good"), "auroc"), TRAIN, TEST) == {
        "majority": 50.0,
        "bag_of_words": 100.0,
    }


def test_a_label_that_training_rows_lack_is_never_predicted():
    three = Task("three", ("a", "b", "c"))
    scores = baseline_scores(three, rows(("x one", 0), ("y two", 2), ("z", 2)), rows(("y two", 2), ("q", 1)))
    assert scores == {"majority": 50.0, "bag_of_words": 50.0}


def test_rows_without_words_or_labels_have_fewer_baselines():
    marks = rows(("!!!", 0), ("???", 1), ("???", 1))
    assert baseline_scores(MOOD, marks, marks) == {"majority": pytest.approx(200 / 3)}
    written = [Row(("a", ""), 0, "b")]
    assert baseline_scores(Task("w", (), "rouge1", "generation"), written, written) == {}
    assert baseline_scores(Task("mood", ("bad", "good"), "loss"), TRAIN, TEST) == {}
    assert baseline_scores(MOOD, TRAIN, []) == {}


def test_rows_beyond_the_most_are_not_learned_from(monkeypatch):
    monkeypatch.setattr(module, "MOST_ROWS", 3)
    train = rows(("good", 1), ("fine", 1), ("bad", 0), ("awful", 0), ("worse", 0))
    found = baseline_scores(Task("t", ("no", "yes")), train, rows(("good", 1), ("any", 1)))
    assert found["majority"] == 100.0


def test_a_silo_without_baselines_is_not_named():
    answers = Task("answers", (), "rouge1", kind="generation")
    written = [Row(("say it",), 0)] * 4
    labeled = rows(("good", 1), ("bad", 0), ("good", 1))
    silos = [
        SiloData("written", answers, Splits(written, written, written)),
        SiloData("labeled", Task("t", ("no", "yes")), Splits(labeled, labeled, labeled)),
    ]
    assert set(baselines(silos, central=False)["silos"]) == {"labeled"}


def test_silos_on_one_test_set_learn_together():
    one, two = (
        SiloData(name, MOOD, Splits(train, [], TEST)) for name, train in (("one", TRAIN[:2]), ("two", TRAIN[2:]))
    )
    assert baselines([one, two], central=True) == {"silos": {}, "global": baseline_scores(MOOD, TRAIN, TEST)}
    apart = baselines([one, two], central=False)
    assert apart["global"] is None
    assert apart["silos"]["one"] == {"majority": pytest.approx(100 / 3)}  # its rows have one label
    assert apart["silos"]["two"] == baseline_scores(MOOD, TRAIN[2:], TEST)


def test_several_labels_are_told_from_words_and_by_their_shares():
    """The constant answers yes where most training rows do; a label that no or every training row has is constant."""
    tags = Task("tags", ("warm", "day", "never", "always"), "micro_f1", "multilabel")
    train = [
        Row(("warm day",), 0, target=(0, 1, 3)),
        Row(("warm",), 0, target=(0, 3)),
        Row(("warm river",), 0, target=(0, 3)),
        Row(("cold day",), 0, target=(1, 3)),
    ] * 6
    test = [Row(("warm stone",), 0, target=(0, 3)), Row(("a cold day",), 0, target=(1, 3))]
    scores = baseline_scores(tags, train, test)
    assert scores["majority"] == pytest.approx(100 * 2 * 3 / (4 + 4))  # warm and always twice: 3 of 4 hit, 4 are true
    assert scores["bag_of_words"] == 100.0
