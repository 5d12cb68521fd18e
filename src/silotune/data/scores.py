"""Scores of predictions: labels, numbers, sets of labels and written answers, also of many resamples at once.

Functions with an argument `drawn` count each row so many times in each resample, so that an interval over a thousand
resamples costs a few products of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from silotune.data.tasks import Task

Counts = NDArray[Any]

Scores = dict[str, float | None]
"""Baseline or metric → score; None where it is not defined."""


@dataclass(frozen=True)
class Classified:
    """Labeled rows with a model's predictions.

    Args:
        logits: shape (rows, classes).
        labels: class indices, shape (rows,).
        positive: index of the class that F1 is about; −1 if none is.
        weights: how much each row counts, shape (rows,); None: each 1.
    """

    logits: Tensor
    labels: Tensor
    positive: int = -1
    weights: Tensor | None = None

    @cached_property
    def predicted(self) -> Tensor:
        """The classes with the largest logit, shape (rows,)."""
        return self.logits.argmax(-1)

    @cached_property
    def probabilities(self) -> Tensor:
        """Probability of every class, shape (rows, classes), float64."""
        return torch.softmax(self.logits.double(), -1)

    @property
    def has_probabilities(self) -> bool:
        """Whether all logits are finite."""
        return bool(torch.isfinite(self.logits).all())

    @cached_property
    def arrays(self) -> tuple[Counts, Counts]:
        """True and predicted classes, each of shape (rows,)."""
        return self.labels.numpy(), self.predicted.numpy()

    @cached_property
    def counts(self) -> tuple[Counts, Counts, Counts]:
        """Rows of each class predicted as it, rows of each class, rows predicted as it; each of shape (classes,)."""
        (labels, predicted), classes, counted = self.arrays, self.logits.shape[1], self.counted
        hits = np.bincount(labels, counted * (labels == predicted), classes)
        return hits, np.bincount(labels, counted, classes), np.bincount(predicted, counted, classes)

    @property
    def counted(self) -> Counts:
        """How much each row counts, shape (rows,)."""
        return np.ones(len(self.labels)) if self.weights is None else self.weights.numpy()

    @cached_property
    def scores(self) -> dict[str, float]:
        """The metrics that follow from `counts`, in percent; see `scores_of`."""
        return {name: float(value) for name, value in scores_of(*self.counts, positive=self.positive).items()}


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Return the share of correct predictions of class indices, shape (rows,)."""
    return 100.0 * float((predicted == labels).double().mean())


def auroc(rows: Classified) -> float | None:
    """Compute the area under the ROC curve; with several classes the mean over one-against-rest areas.

    None if only one class occurs, or a logit is infinite or NaN.
    """
    labels, probabilities = rows.labels.numpy(), rows.probabilities.numpy()
    occurring = sorted({*labels.tolist()})
    if len(occurring) < 2 or not rows.has_probabilities:
        return None
    classes = [1] if probabilities.shape[1] == 2 else occurring
    once = rows.counted[None]
    areas = [float(roc_areas(once, labels == of, probabilities[:, of])[0]) for of in classes]
    return 100.0 * math.fsum(areas) / len(areas)


METRICS: dict[str, Callable[[Classified], float | None]] = {
    "accuracy": lambda rows: rows.scores["accuracy"],
    "f1": lambda rows: rows.scores.get("f1", 0.0),
    "macro_f1": lambda rows: rows.scores["macro_f1"],
    "balanced_accuracy": lambda rows: rows.scores["balanced_accuracy"],
    "mcc": lambda rows: rows.scores["mcc"],
    "auroc": auroc,
}
"""Metrics of tasks whose rows have labels, in percent. F1 is of the positive class, as MRPC and QQP are judged."""


def rouge1(written: Sequence[str], answers: Sequence[str]) -> float:
    """Return the mean ROUGE-1 F-measure, by Google's package `rouge-score` without stemming."""
    return _mean(rouge_scores("rouge1", written, answers))


def rouge_l(written: Sequence[str], answers: Sequence[str]) -> float:
    """Return the mean ROUGE-L F-measure (longest common subsequence of words); arguments as for `rouge1`."""
    return _mean(rouge_scores("rougeL", written, answers))


def rouge_scores(kind: str, written: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return each row's F-measure of `rouge1` or `rougeL`, between 0 and 1; arguments as for `rouge1`."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([kind], use_stemmer=False)
    return [scorer.score(answer, text)[kind].fmeasure for text, answer in zip(written, answers, strict=True)]


def _mean(scores: Sequence[float]) -> float:
    return float(100.0 * sum(scores) / len(scores))


def exact_matches(written: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return 1 for each generated text that equals its reference, ignoring surrounding white space, else 0."""
    return [float(text.strip() == answer.strip()) for text, answer in zip(written, answers, strict=True)]


def exact_match(written: Sequence[str], answers: Sequence[str]) -> float:
    """Return the share of generated texts that equal their reference; see `exact_matches`."""
    return _mean(exact_matches(written, answers))


def perplexity(loss: float) -> float:
    """Return `exp(loss)`; infinite where that is too large for a number."""
    return math.exp(loss) if loss < 700 else math.inf


TEXT_SCORES: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    "rouge1": rouge1,
    "rougeL": rouge_l,
    "exact_match": exact_match,
    "accuracy": exact_match,
}

LOSS_SCORES: dict[str, Callable[[float], float]] = {"loss": float, "perplexity": perplexity}
"""Functions of the mean loss of the head; **lower is better**. They need no written answers."""


def scores_of(hits: Counts, true: Counts, predicted: Counts, positive: int) -> dict[str, Counts]:
    """Score confusion matrices, in percent; a ratio without denominator is 0.

    Args:
        hits: rows of each class that are predicted as it, shape (…, classes).
        true: rows of each class, same shape.
        predicted: rows predicted as each class, same shape.
        positive: index of the class that F1 is about; −1 if none is.

    Returns:
        metric → scores, shape (…): `accuracy`; `macro_f1`, the mean over classes that occur or are predicted;
        `balanced_accuracy`, the mean recall of classes that occur; `mcc`, Matthews' correlation coefficient; `f1` if
        there is a positive class.
    """
    rows = true.sum(-1)
    f1 = ratio(2 * hits, true + predicted)
    covariance = hits.sum(-1) * rows - (true * predicted).sum(-1)
    spreads = [np.maximum(rows**2 - (of**2).sum(-1), 0) for of in (true, predicted)]
    varies = np.minimum(*spreads) > 1e-12 * rows**2  # of weights less is rounding
    spread = np.where(varies, np.sqrt(spreads[0] * spreads[1]), 0)
    scores = {
        "accuracy": hits.sum(-1) / rows,
        "macro_f1": f1.sum(-1) / ((true + predicted) > 0).sum(-1),
        "balanced_accuracy": ratio(hits, true).sum(-1) / (true > 0).sum(-1),
        "mcc": ratio(covariance, spread),
    }
    if positive >= 0:
        scores["f1"] = f1[..., positive]
    return {name: 100 * values for name, values in scores.items()}


def roc_areas(drawn: Counts, positive: Counts, score: Counts) -> Counts:
    """Return the areas under ROC curves, shape (resamples,); NaN without rows of the class, or without others.

    The area is the chance that a row of the class has a larger score than a row of another class, ties counting half
    (Hanley and McNeil 1982).

    Args:
        drawn: how often each row counts, shape (resamples, rows).
        positive: whether each row is of the class, shape (rows,).
        score: each row's score of the class, shape (rows,).
    """
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.diff(score[order], prepend=-np.inf))  # rows of equal score count together
    inside = np.add.reduceat(drawn[:, order] * positive[order], starts, axis=1)
    outside = np.add.reduceat(drawn[:, order] * ~positive[order], starts, axis=1)
    below = outside.cumsum(1) - outside
    pairs = inside.sum(1) * outside.sum(1)
    ordered = (inside * (below + outside / 2)).sum(1)
    areas: Counts = np.divide(ordered, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)
    return areas


def ratio(numerator: Counts, denominator: Counts) -> Counts:
    """Return the quotient of each pair of entries, or 0 where the denominator is 0."""
    zeros = np.zeros_like(numerator, dtype=float)
    quotient: Counts = np.divide(numerator, denominator, out=zeros, where=denominator > 0)
    return quotient


def label_set_scores(logits: Counts, true: Counts, drawn: Counts | None = None) -> dict[str, Counts]:
    """Score predicted sets of labels, in percent; a label is predicted where its logit is above 0.

    Args:
        logits: shape (rows, labels).
        true: whether a row has a label, shape (rows, labels).
        drawn: how often each row counts, shape (resamples, rows); None: each once.

    Returns:
        metric → scores, shape (resamples,): `micro_f1`, F1 of all pairs of row and label; `macro_f1`, the mean of the
        labels' F1; `accuracy`, the share of rows whose set is right as a whole; `auroc`, the mean over the labels that
        some rows have and some have not (NaN if there is none). F1 without any true or predicted label is 0.
    """
    true, answers = true > 0, logits > 0
    drawn = np.ones((1, len(true))) if drawn is None else drawn.astype(float)
    hits, of_true, of_answers = (drawn @ of.astype(float) for of in (true & answers, true, answers))
    areas = np.stack([roc_areas(drawn, true[:, label], logits[:, label]) for label in range(true.shape[1])])
    known = ~np.isnan(areas)
    scores = {
        "micro_f1": ratio(2 * hits.sum(1), of_true.sum(1) + of_answers.sum(1)),
        "macro_f1": ratio(2 * hits, of_true + of_answers).mean(1),
        "accuracy": drawn @ (true == answers).all(1) / drawn.sum(1),
        "auroc": np.where(known.any(0), np.where(known, areas, 0).sum(0) / np.maximum(known.sum(0), 1), np.nan),
    }
    return {name: 100 * values for name, values in scores.items()}


_CONSTANT = 1e-13
"""A standard deviation below this share of the mean is rounding, as in `scipy.stats.pearsonr`."""


def number_scores(predicted: Counts, true: Counts, drawn: Counts | None = None) -> dict[str, Counts]:
    """Score predicted numbers.

    Args:
        predicted: shape (rows,).
        true: the rows' own numbers, shape (rows,).
        drawn: how often each row counts, shape (resamples, rows); None: each once.

    Returns:
        metric → scores, shape (resamples,): `pearson` and `spearman`, the correlations × 100; `pearson_spearman`, their
        mean; `mse` and `mae`, the mean squared and absolute error in units of the labels. A correlation is 0 where all
        predictions are equal, and NaN where all true numbers are.
    """
    predicted, true = predicted.astype(float), true.astype(float)
    drawn = np.ones((1, len(true))) if drawn is None else drawn.astype(float)
    rows = drawn.sum(1)
    pearson = 100 * _correlation(predicted[None], true[None], drawn)
    spearman = 100 * _correlation(_ranks(predicted, drawn), _ranks(true, drawn), drawn)
    errors = predicted - true
    return {
        "pearson": pearson,
        "spearman": spearman,
        "pearson_spearman": (pearson + spearman) / 2,
        "mse": drawn @ errors**2 / rows,
        "mae": drawn @ np.abs(errors) / rows,
    }


def _correlation(first: Counts, second: Counts, drawn: Counts) -> Counts:
    """Return Pearson's correlation of each resample; values have shape (resamples, rows), or (1, rows) for all."""
    rows = drawn.sum(1, keepdims=True)
    means = [(drawn * of).sum(1, keepdims=True) / rows for of in (first, second)]
    centered = [of - mean for of, mean in zip((first, second), means, strict=True)]
    spreads = [np.sqrt((drawn * of**2).sum(1) / rows[:, 0]) for of in centered]
    constant = [spread <= _CONSTANT * np.abs(mean[:, 0]) for spread, mean in zip(spreads, means, strict=True)]
    covariance = (drawn * centered[0] * centered[1]).sum(1) / rows[:, 0]
    product = np.where(constant[0] | constant[1], 1.0, spreads[0] * spreads[1])
    correlation = np.clip(covariance / product, -1, 1)
    correlated: Counts = np.where(constant[1], np.nan, np.where(constant[0], 0.0, correlation))
    return correlated


def _ranks(values: Counts, drawn: Counts) -> Counts:
    """Return the rank of every row in each resample, shape (resamples, rows); equal values share their mean rank.

    A row that is drawn k times takes k places; the ranks of rows that are not drawn are meaningless.
    """
    unique, of_row = np.unique(values, return_inverse=True)
    order = np.argsort(of_row, kind="stable")
    starts = np.searchsorted(of_row[order], np.arange(len(unique)))
    places = np.add.reduceat(drawn[:, order], starts, axis=1)
    ranks: Counts = (places.cumsum(1) - places + (places + 1) / 2)[:, of_row]
    return ranks


def judge(task: Task, metric: str, logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> float | None:
    """Return the score of logits; None where it is not defined, as where no row counts.

    The task is not one of generation, and the metric is no loss. Logits have shape (rows, outputs), targets are as
    `Kind.targets` makes them; `weights`, shape (rows,), say how much each row counts that has one label.
    """
    if weights is not None:
        rows = Classified(logits, targets, task.positive_index, weights)
        return METRICS[metric](rows) if bool(weights.any()) else None
    score: float | None = task.rules.judge(task, metric, logits, targets)
    return score


def all_scores(task: Task, logits: Tensor, targets: Tensor) -> dict[str, float | None]:
    """Return the scores that follow from `Kind.scores`; arguments as for `judge`."""
    scores = {name: float(values[0]) for name, values in task.rules.scores(task, logits, targets).items()}
    return {name: None if math.isnan(score) else score for name, score in scores.items()}


def constant_score(task: Task, targets: Tensor) -> float | None:
    """Return the score of the best constant answer (`Kind.constant`)."""
    return judge(task, task.metric, task.rules.constant_outputs(task, targets), targets)
