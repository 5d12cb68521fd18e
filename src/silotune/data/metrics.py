"""`METRICS`: accuracy, F1, ROUGE and exact match in percent, loss, perplexity; `lower_is_better`; `majority_score`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Share of correct predictions.

    Args:
        predicted: class indices, shape (rows,).
        labels: class indices, shape (rows,).
    """
    return 100.0 * float((predicted == labels).double().mean())


def f1(predicted: Tensor, labels: Tensor) -> float:
    """F1 score of class 1, the metric of MRPC and QQP. Arguments as for `accuracy`."""
    hits = float(((predicted == 1) & (labels == 1)).sum())
    total = float((predicted == 1).sum() + (labels == 1).sum())
    return 100.0 * 2 * hits / total if total else 0.0


def rouge1(written: Sequence[str], answers: Sequence[str]) -> float:
    """Mean ROUGE-1 F-measure, by Google's package `rouge-score` without stemming.

    Args:
        written: generated texts.
        answers: reference texts.
    """
    return _rouge("rouge1", written, answers)


def rouge_l(written: Sequence[str], answers: Sequence[str]) -> float:
    """Mean ROUGE-L F-measure (longest common subsequence of words); arguments as for `rouge1`."""
    return _rouge("rougeL", written, answers)


def _rouge(kind: str, written: Sequence[str], answers: Sequence[str]) -> float:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([kind], use_stemmer=False)
    scores = [scorer.score(answer, text)[kind].fmeasure for text, answer in zip(written, answers, strict=True)]
    return float(100.0 * sum(scores) / len(scores))


def exact_match(written: Sequence[str], answers: Sequence[str]) -> float:
    """Share of generated texts that equal their reference, ignoring surrounding white space."""
    hits = [text.strip() == answer.strip() for text, answer in zip(written, answers, strict=True)]
    return 100.0 * sum(hits) / len(hits)


def perplexity(loss: float) -> float:
    """Return `exp(loss)`; infinite where that is too large for a number."""
    return math.exp(loss) if loss < 700 else math.inf


TEXT_METRICS: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    "rouge1": rouge1,
    "rougeL": rouge_l,
    "exact_match": exact_match,
    "accuracy": exact_match,
}

LOSS_METRICS: dict[str, Callable[[float], float]] = {"loss": float, "perplexity": perplexity}
"""Functions of the mean loss of the head; **lower is better**. They need no written answers."""

LOSS = "loss"


def lower_is_better(metric: str) -> bool:
    """Return whether a lower score by this metric is better."""
    return metric in LOSS_METRICS


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {"accuracy": accuracy, "f1": f1}


def majority_score(metric: str, labels: Tensor) -> float:
    """Score of always predicting the most frequent class (F1 is 0 if that is class 0)."""
    return METRICS[metric](torch.full_like(labels, int(torch.bincount(labels).argmax())), labels)
