"""Metrics of numbers and of sets of labels: as scipy and scikit-learn compute them, also for resamples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sklearn_metrics

from silotune.data.scores import constant_score, judge, label_set_scores, number_scores
from silotune.data.tasks import LABEL_SET_METRICS, NUMBER_METRICS, Task
from silotune.evaluation.score_details import Bootstrap

STS = Task("sts", (), "pearson_spearman", "regression")
TOPICS = Task("topics", ("art", "law", "sport"), "micro_f1", "multilabel")


def numbers(seed: int, rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Predicted numbers, and true ones with many ties, as STS-B has them."""
    draws = np.random.default_rng(seed)
    true = draws.integers(0, 11, rows) / 2
    return np.round(true + draws.normal(size=rows), 1), true


def by_libraries(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    pearson, spearman = stats.pearsonr(predicted, true).statistic, stats.spearmanr(predicted, true).statistic
    return {
        "pearson": 100 * pearson,
        "spearman": 100 * spearman,
        "pearson_spearman": 50 * (pearson + spearman),
        "mse": sklearn_metrics.mean_squared_error(true, predicted),
        "mae": sklearn_metrics.mean_absolute_error(true, predicted),
    }


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_scipy_and_scikit_learn(seed: int) -> None:
    predicted, true = numbers(seed)
    scores = {name: float(values[0]) for name, values in number_scores(predicted, true).items()}
    assert scores == pytest.approx(by_libraries(predicted, true), abs=1e-9)
    assert set(scores) == set(NUMBER_METRICS)
    shifted = {name: float(of[0]) for name, of in number_scores(predicted + 1e6, true + 1e6).items()}
    assert shifted == pytest.approx(scores, abs=1e-6)


def test_a_resample_counts_as_its_rows_written_out() -> None:
    predicted, true = numbers(7)
    drawn = np.random.default_rng(1).multinomial(40, np.full(40, 1 / 40), size=6)
    scores = number_scores(predicted, true, drawn)
    for place, times in enumerate(drawn):
        expected = by_libraries(np.repeat(predicted, times), np.repeat(true, times))
        assert {name: float(of[place]) for name, of in scores.items()} == pytest.approx(expected, abs=1e-9)


def test_a_constant_answer_has_no_correlation_and_constant_labels_no_score() -> None:
    predicted, true = torch.full((4, 1), 2.3), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert judge(STS, "pearson", predicted, true) == 0.0
    assert judge(STS, "spearman", true[:, None], predicted[:, 0]) is None
    assert judge(STS, "mse", predicted, true) == pytest.approx(1.29)
    assert constant_score(Task("sts", (), "mse", "regression"), true) == pytest.approx(1.25)  # the variance


def test_intervals_surround_the_score() -> None:
    predicted, true = numbers(3, rows=200)
    bounds = Bootstrap(300, 1, "a").of_targets(STS, torch.tensor(predicted)[:, None], torch.tensor(true))
    for name, score in by_libraries(predicted, true).items():
        low, high = bounds[name]
        assert low < score < high, name
    half = 100 * 1.96 * (1 - (by_libraries(predicted, true)["pearson"] / 100) ** 2) / np.sqrt(200)  # of normal values
    low, high = bounds["pearson"]
    assert (high - low) / 2 == pytest.approx(half, rel=0.35)


@pytest.mark.parametrize("seed", range(3))
def test_sets_of_labels_are_scored_as_by_scikit_learn(seed: int) -> None:
    draws = np.random.default_rng(seed)
    logits, true = draws.normal(size=(60, 3)), draws.integers(0, 2, (60, 3))
    logits += true
    times = draws.multinomial(60, np.full(60, 1 / 60), size=3)
    for drawn, rows in [
        (None, np.arange(60)),
        *((times[n : n + 1], np.repeat(np.arange(60), times[n])) for n in range(3)),
    ]:
        scores = {name: float(of[0]) for name, of in label_set_scores(logits, true, drawn).items()}
        known, said = true[rows], logits[rows] > 0
        assert scores == pytest.approx(
            {
                "micro_f1": 100 * sklearn_metrics.f1_score(known, said, average="micro"),
                "macro_f1": 100 * sklearn_metrics.f1_score(known, said, average="macro"),
                "accuracy": 100 * sklearn_metrics.accuracy_score(known, said),
                "auroc": 100 * sklearn_metrics.roc_auc_score(known, logits[rows], average="macro"),
            }
        )
    assert set(LABEL_SET_METRICS) == set(scores)


def test_labels_that_never_occur_have_no_area_and_no_f1() -> None:
    logits, true = torch.tensor([[1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]), torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    assert judge(TOPICS, "auroc", logits, true) == 100.0
    assert judge(TOPICS, "auroc", logits, torch.zeros(2, 3)) is None
    assert judge(TOPICS, "macro_f1", logits, true) == pytest.approx(100 / 3)
    assert judge(TOPICS, "micro_f1", -torch.ones(2, 3), torch.zeros(2, 3)) == 0.0
    assert constant_score(TOPICS, torch.tensor([[1.0, 0, 0], [1, 1, 0], [1, 0, 0]])) == pytest.approx(100 * 6 / 7)
