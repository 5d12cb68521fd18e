"""Metrics, intervals and calibration against scikit-learn and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as library
from sklearn.calibration import calibration_curve as library_curve

from silotune.data.scores import METRICS, Classified, constant_score, exact_match, roc_areas, rouge1, rouge_l, scores_of
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.score_details import (
    BINS,
    Bootstrap,
    calibration_curve,
    label_details,
    log_loss,
    target_details,
)


def drawn(rows: int, classes: int, seed: int, positive: int = -1) -> Classified:
    """Random logits and labels; the last class never occurs among the labels where there are more than three."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator)
    labels = torch.randint(classes - (classes > 3), (rows,), generator=generator)
    return Classified(logits, labels, positive)


CASES = [(40, 2, 1), (200, 3, 2), (57, 6, 3), (9, 2, 5)]


def of_classes_by_library(labels, predicted, positive):
    return {
        "accuracy": library.accuracy_score(labels, predicted),
        "f1": library.f1_score(labels, predicted, labels=[positive], average=None)[0],
        "macro_f1": library.f1_score(labels, predicted, average="macro"),
        "balanced_accuracy": np.mean([(predicted[labels == of] == of).mean() for of in np.unique(labels)]),
        "mcc": library.matthews_corrcoef(labels, predicted),
    }


@pytest.mark.parametrize(("rows", "classes", "seed"), CASES)
def test_every_metric_is_that_of_the_library(rows, classes, seed):
    found = drawn(rows, classes, seed, positive=0)
    labels, predicted = found.labels.numpy(), found.predicted.numpy()
    probabilities = torch.softmax(found.logits.double(), -1).numpy()
    occurring = np.unique(labels)
    if classes == 2:
        area = library.roc_auc_score(labels, probabilities[:, 1])
    else:
        kept = probabilities[:, occurring] / probabilities[:, occurring].sum(1, keepdims=True)
        area = np.mean([library.roc_auc_score(labels == of, probabilities[:, of]) for of in occurring])
        if len(occurring) == classes:
            kept = library.roc_auc_score(labels, kept, multi_class="ovr", average="macro")
            assert area == pytest.approx(kept)
    expected = of_classes_by_library(labels, predicted, 0) | {"auroc": area}
    assert expected.keys() == METRICS.keys()
    for name, value in expected.items():
        assert METRICS[name](found) == pytest.approx(100 * value), name


def test_one_class_has_no_roc_curve():
    logits = torch.randn(4, 2)
    assert METRICS["auroc"](Classified(logits, torch.zeros(4, dtype=torch.int64))) is None
    assert METRICS["auroc"](Classified(logits * math.inf, torch.tensor([0, 1, 0, 1]))) is None
    assert METRICS["mcc"](Classified(logits, torch.zeros(4, dtype=torch.int64))) == 0.0


def test_the_majority_by_every_metric():
    labels = torch.tensor([0, 0, 0, 1])
    expected = {"accuracy": 75, "f1": 0, "macro_f1": 100 * (6 / 7) / 2, "balanced_accuracy": 50, "mcc": 0, "auroc": 50}
    for metric, value in expected.items():
        assert constant_score(Task("t", ("a", "b"), metric, positive="b"), labels) == pytest.approx(value), metric
    assert constant_score(Task("t", ("a", "b"), "f1", positive="a"), labels) == pytest.approx(100 * 6 / 7)


# -- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "classes", "seed"), CASES)
def test_resampled_scores_are_those_of_the_library(rows, classes, seed):
    """A resample of a confusion matrix's cells is scored as scikit-learn scores the rows it stands for."""
    generator = np.random.default_rng(seed)
    positive = 1
    for _ in range(5):
        labels, predicted = generator.integers(classes, size=(2, rows))
        one_hot = np.eye(classes)
        hit, true, said = one_hot[labels] * one_hot[predicted], one_hot[labels], one_hot[predicted]
        scores = scores_of(*(counts.sum(0, keepdims=True) for counts in (hit, true, said)), positive=positive)
        expected = of_classes_by_library(labels, predicted, positive)
        assert scores.keys() == expected.keys() == METRICS.keys() - {"auroc"}
        for name, values in scores.items():
            assert values[0] == pytest.approx(100 * expected[name]), name


def test_an_interval_of_accuracy_is_that_of_a_binomial():
    """70 of 100 rows right: the resampled accuracies are binomial, whose percentiles are known."""
    from scipy.stats import binom

    predicted = torch.tensor([1] * 70 + [0] * 30)
    rows = Classified(torch.eye(2)[predicted], torch.ones(100, dtype=torch.int64))
    low, high = Bootstrap(20_000, 1, "silo").of_classes(rows)["accuracy"]
    assert (low, high) == pytest.approx((binom.ppf(0.025, 100, 0.7), binom.ppf(0.975, 100, 0.7)), abs=1)


def test_intervals_follow_from_seed_and_purpose():
    rows = drawn(60, 3, 1)
    first = Bootstrap(200, 1, "a").of_classes(rows)
    assert first == Bootstrap(200, 1, "a").of_classes(rows)
    assert first != Bootstrap(200, 1, "b").of_classes(rows)
    assert first != Bootstrap(200, 2, "a").of_classes(rows)
    for name, (low, high) in first.items():
        assert low < METRICS[name](rows) < high
    assert Bootstrap(0, 1, "a").of_classes(rows) == {}
    assert Bootstrap(0, 1, "a").of_areas(rows) is None


def test_pieces_are_the_same_draws(monkeypatch):
    rows = drawn(60, 3, 1)
    whole = Bootstrap(200, 1, "a").of_classes(rows)
    monkeypatch.setattr("silotune.evaluation.score_details._MOST_NUMBERS", 64)
    assert Bootstrap(200, 1, "a").of_classes(rows) == {name: pytest.approx(found) for name, found in whole.items()}


@pytest.mark.parametrize(("rows", "classes"), [(60, 2), (30, 3)])
def test_areas_of_resamples_are_those_of_the_library(rows, classes):
    """With ties: probabilities are rounded."""
    found = drawn(rows, classes, 6)
    scores = found.probabilities.numpy().round(1)
    resamples = np.random.default_rng(1).multinomial(rows, [1 / rows] * rows, size=10)
    for of in range(classes):
        positive = found.labels.numpy() == of
        expected = [library.roc_auc_score(positive, scores[:, of], sample_weight=weights) for weights in resamples]
        assert roc_areas(resamples, positive, scores[:, of]) == pytest.approx(np.array(expected))
    assert np.isnan(roc_areas(resamples[:1] * positive, positive, scores[:, of])).all()
    low, high = Bootstrap(300, 1, "a").of_areas(found)
    assert low < METRICS["auroc"](found) < high


def test_an_areas_interval_is_of_the_mean_over_classes():
    """The middle 95 % of the resamples' areas; of one class of three alone it would be another interval."""
    found = drawn(60, 3, 6)
    bootstrap = Bootstrap(300, 1, "a")
    (draws,) = bootstrap._draw(np.ones(60, dtype=int), 1)
    labels, probabilities = found.labels.numpy(), found.probabilities.numpy()
    by_class = np.array([roc_areas(draws, labels == of, probabilities[:, of]) for of in range(3)])
    assert bootstrap.of_areas(found) == pytest.approx(np.percentile(100 * by_class.mean(0), [2.5, 97.5]), abs=1e-9)
    assert abs(np.percentile(100 * by_class[1], 2.5) - bootstrap.of_areas(found)[0]) > 1


def test_means_over_rows_have_intervals():
    values = [0.0, 1.0] * 50
    low, high = Bootstrap(2000, 1, "a").of_means({"exact_match": values})["exact_match"]
    assert (low, high) == pytest.approx((40, 60), abs=1.5)  # 50 ± 1.96 · 100 · ½ / √100
    (draws,) = Bootstrap(2000, 1, "a")._draw(np.ones(100, dtype=int), 1)
    assert (low, high) == pytest.approx(np.percentile(draws @ values, [2.5, 97.5]), abs=1e-9)


# -- calibration and classes ------------------------------------------------------------------------------------------


def test_the_calibration_error_by_hand():
    rows = drawn(300, 3, 7)
    shares, right = rows.probabilities.max(-1).values.tolist(), (rows.predicted == rows.labels).tolist()
    bins: dict[int, list[tuple[float, bool]]] = {}
    for share, hit in zip(shares, right, strict=True):
        bins.setdefault(min(BINS - 1, math.ceil(share * BINS) - 1), []).append((share, hit))
    error = sum(abs(sum(s for s, _ in found) - sum(h for _, h in found)) for found in bins.values()) / 300
    curve = calibration_curve(rows)
    assert curve["error"] == pytest.approx(error)
    assert curve["rows"] == [len(bins[number]) for number in sorted(bins)]
    accuracy, confidence = library_curve(right, shares, n_bins=BINS)
    assert curve["accuracy"] == pytest.approx(accuracy)
    assert curve["confidence"] == pytest.approx(confidence)


def test_classes_and_confusion_by_hand():
    logits = torch.tensor([[2.0, 0, 0], [2, 0, 0], [0, 2, 0], [2, 0, 0]])
    rows = Classified(logits, torch.tensor([0, 1, 1, 0]), 1)
    found = label_details(rows, Task("t", ("a", "b", "c"), "f1", positive="b"), Bootstrap(50, 1, "t"))
    assert found["confusion"] == [[2, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert found["per_class"]["a"] == pytest.approx({"precision": 200 / 3, "recall": 100, "f1": 80, "rows": 2})
    assert found["per_class"]["c"] == {"precision": 0, "recall": 0, "f1": 0, "rows": 0}
    assert found["metrics"]["f1"] == pytest.approx(200 / 3)
    assert found["metrics"]["log_loss"] == pytest.approx(
        -np.mean([math.log(p[y]) for p, y in zip(rows.probabilities.tolist(), (0, 1, 1, 0), strict=True)])
    )
    assert found["positive"] == "b"
    for number, metric in enumerate(("precision", "recall", "f1")):
        expected = library.precision_recall_fscore_support((0, 1, 1, 0), (0, 0, 1, 0), labels=range(3), zero_division=0)
        assert [of[metric] for of in found["per_class"].values()] == pytest.approx(100 * expected[number])


def test_details_have_the_calibration_error_in_percent_and_f1_only_of_a_label_that_it_is_about():
    rows = drawn(300, 3, 7)
    found = label_details(rows, Task("t", ("a", "b", "c")), Bootstrap(50, 1, "t"))
    assert found["metrics"]["ece"] == pytest.approx(100 * calibration_curve(rows)["error"], rel=1e-12)
    assert "f1" not in found["metrics"]
    assert "f1" not in found["intervals"]
    assert "macro_f1" in found["metrics"]


def test_f1_may_be_about_the_first_label():
    rows = drawn(60, 2, 9, positive=0)
    found = label_details(rows, Task("t", ("a", "b"), "f1", positive="a"), Bootstrap(50, 1, "t"))
    assert found["metrics"]["f1"] == pytest.approx(100 * library.f1_score(rows.labels, rows.predicted, pos_label=0))


def test_each_of_several_labels_by_the_library():
    draws = torch.Generator().manual_seed(3)
    logits, marks = torch.randn(80, 3, generator=draws), (torch.rand(80, 3, generator=draws) < 0.4).float()
    rows = TokenizedRows(Task("t", ("a", "b", "c"), "micro_f1", kind="multilabel"), [[1]] * 80, None, marks)
    found = target_details(logits, rows, Bootstrap(50, 1, "t"))["per_class"]
    for name, by_label in zip(
        ("precision", "recall", "f1", "rows"),
        library.precision_recall_fscore_support(marks.numpy(), (logits > 0).numpy(), zero_division=0),
        strict=True,
    ):
        factor = 1 if name == "rows" else 100
        assert [found[label][name] for label in "abc"] == pytest.approx(factor * by_label)


def test_the_loss_is_that_of_the_library_also_where_a_probability_is_nothing():
    rows = drawn(60, 5, 8)
    assert log_loss(rows) == pytest.approx(library.log_loss(rows.labels, rows.probabilities, labels=range(5)))
    sure = Classified(1000 * torch.eye(2), torch.tensor([0, 0]))
    assert log_loss(sure) == pytest.approx(library.log_loss(sure.labels, sure.probabilities, labels=[0, 1]))


def test_text_metrics_by_hand():
    """One of two words alike: precision and recall of a half; the order counts for ROUGE-L alone."""
    written, answers = ["a b", "b a", " same "], ["a c", "a b", "same"]
    assert rouge1(written, answers) == pytest.approx(100 * (0.5 + 1 + 1) / 3)
    assert rouge_l(written, answers) == pytest.approx(100 * (0.5 + 0.5 + 1) / 3)
    assert exact_match(written, answers) == pytest.approx(100 / 3)
