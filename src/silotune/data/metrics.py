"""Names of metrics by kind of task, their ranges and directions, and how tables write them.

`data/scores.py` computes them.
"""

from __future__ import annotations

import math

LABEL_METRICS = ("accuracy", "f1", "macro_f1", "balanced_accuracy", "mcc", "auroc")
"""Metrics of rows with one label each, in percent. F1 is of the positive class, as MRPC and QQP are judged."""

TEXT_METRICS = ("rouge1", "rougeL", "exact_match", "accuracy")
"""Metrics of written answers, in percent; accuracy is of answers that are options."""

NUMBER_METRICS = ("pearson_spearman", "pearson", "spearman", "mse", "mae")
"""Metrics of numbers; the first is the usual one."""

ERROR_METRICS = ("mse", "mae")
"""Metrics of numbers in units of the labels; **lower is better**."""

LABEL_SET_METRICS = ("micro_f1", "macro_f1", "accuracy", "auroc")
"""Metrics of rows with several labels; the first is the usual one."""

LOSS_METRICS = ("loss", "perplexity")
"""Metrics that follow from the mean loss of the head; **lower is better**. They need no written answers."""

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
