"""`METRICS` of labels, written answers, the loss, and names of all others; `lower_is_better`; `majority_score`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from silotune.data.class_counts import Counts, roc_areas, scores_of


@dataclass(frozen=True)
class Classified:
    """Rows with labels, and what a model makes of them.

    Args:
        logits: shape (rows, classes).
        labels: class indices, shape (rows,).
        positive: index of the class that F1 is about; −1 if none is.
    """

    logits: Tensor
    labels: Tensor
    positive: int = -1

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
        (labels, predicted), classes = self.arrays, self.logits.shape[1]
        hits, true, said = (
            np.bincount(of, minlength=classes).astype(float) for of in (labels[labels == predicted], labels, predicted)
        )
        return hits, true, said

    @cached_property
    def scores(self) -> dict[str, float]:
        """The metrics that follow from `counts`, in percent; see `scores_of`."""
        return {name: float(value) for name, value in scores_of(*self.counts, positive=self.positive).items()}


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Share of correct predictions.

    Args:
        predicted: class indices, shape (rows,).
        labels: class indices, shape (rows,).
    """
    return 100.0 * float((predicted == labels).double().mean())


def auroc(rows: Classified) -> float | None:
    """Area under the ROC curve; with more than two classes the mean over those that occur, each against the rest.

    None if only one class occurs, or a logit is infinite or NaN.
    """
    labels, probabilities = rows.labels.numpy(), rows.probabilities.numpy()
    occurring = sorted({*labels.tolist()})
    if len(occurring) < 2 or not rows.has_probabilities:
        return None
    classes = [1] if probabilities.shape[1] == 2 else occurring
    once = np.ones((1, len(labels)), dtype=int)
    areas = [float(roc_areas(once, labels == of, probabilities[:, of])[0]) for of in classes]
    return 100.0 * math.fsum(areas) / len(areas)


METRICS: dict[str, Callable[[Classified], float | None]] = {
    "accuracy": lambda rows: accuracy(rows.predicted, rows.labels),
    "f1": lambda rows: rows.scores.get("f1", 0.0),
    "macro_f1": lambda rows: rows.scores["macro_f1"],
    "balanced_accuracy": lambda rows: rows.scores["balanced_accuracy"],
    "mcc": lambda rows: rows.scores["mcc"],
    "auroc": auroc,
}
"""Metrics of tasks whose rows have labels, in percent. F1 is of the positive class, as MRPC and QQP are judged."""


def majority_score(metric: str, labels: Tensor, positive: int = -1) -> float | None:
    """Score of always predicting the most frequent class (F1 is 0 if that is not the positive one)."""
    classes = max(2, int(labels.max()) + 1)
    constant = torch.zeros(len(labels), classes)
    constant[:, int(torch.bincount(labels).argmax())] = 1
    return METRICS[metric](Classified(constant, labels, positive))


def rouge1(written: Sequence[str], answers: Sequence[str]) -> float:
    """Mean ROUGE-1 F-measure, by Google's package `rouge-score` without stemming.

    Args:
        written: generated texts.
        answers: reference texts.
    """
    return _mean(rouge_scores("rouge1", written, answers))


def rouge_l(written: Sequence[str], answers: Sequence[str]) -> float:
    """Mean ROUGE-L F-measure (longest common subsequence of words); arguments as for `rouge1`."""
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
    """Share of generated texts that equal their reference; see `exact_matches`."""
    return _mean(exact_matches(written, answers))


def perplexity(loss: float) -> float:
    """Return `exp(loss)`; infinite where that is too large for a number."""
    return math.exp(loss) if loss < 700 else math.inf


TEXT_METRICS: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    "rouge1": rouge1,
    "rougeL": rouge_l,
    "exact_match": exact_match,
    "accuracy": exact_match,
}

NUMBER_METRICS = ("pearson_spearman", "pearson", "spearman", "mse", "mae")
"""Metrics of numbers (`data/number_scores.py`); the first is the usual one."""

ERROR_METRICS = ("mse", "mae")
"""Metrics of numbers in units of the labels; **lower is better**."""

LABEL_SET_METRICS = ("micro_f1", "macro_f1", "accuracy", "auroc")
"""Metrics of rows with several labels (`data/label_set_scores.py`); the first is the usual one."""

LOSS_METRICS: dict[str, Callable[[float], float]] = {"loss": float, "perplexity": perplexity}
"""Functions of the mean loss of the head; **lower is better**. They need no written answers."""

LOSS = "loss"

NAMES = {
    "f1": "F1",
    "macro_f1": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "mcc": "MCC",
    "auroc": "AUROC",
    "rouge1": "ROUGE-1",
    "rougeL": "ROUGE-L",
    "exact_match": "exact match",
    "micro_f1": "micro F1",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "pearson_spearman": "mean of Pearson and Spearman",
    "mse": "MSE",
    "mae": "MAE",
    "ece": "ECE",
    "log_loss": "log loss",
}
"""Metrics as tables and pages write them, where that is not the key itself."""

SIGNED = ("mcc", "pearson", "spearman", "pearson_spearman")
"""Metrics that may be negative, down to −100."""


def metric_title(metric: str, positive: str = "") -> str:
    """Return a metric's name for display; F1 with the label that it is about."""
    name = NAMES.get(metric, metric)
    return f"{name} of {positive}" if metric == "f1" and positive else name


def lower_is_better(metric: str) -> bool:
    """Return whether a lower score by this metric is better."""
    return metric in (*LOSS_METRICS, *ERROR_METRICS)


def metric_range(metric: str) -> tuple[float, float]:
    """Return the lowest and the highest value of a metric."""
    if lower_is_better(metric):
        return 0.0, math.inf
    return (-100.0 if metric in SIGNED else 0.0), 100.0
