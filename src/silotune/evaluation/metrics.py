"""Metrics of predictions against labels, in percent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Share of rows predicted right, in percent."""
    return 100.0 * float((predicted == labels).double().mean())


def f1(predicted: Tensor, labels: Tensor) -> float:
    """F1 of class 1, in percent (the metric of MRPC and QQP)."""
    hits = float(((predicted == 1) & (labels == 1)).sum())
    found = float((predicted == 1).sum() + (labels == 1).sum())
    return 100.0 * 2 * hits / found if found else 0.0


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {"accuracy": accuracy, "f1": f1}


def majority(labels: Tensor) -> float:
    """The accuracy of always answering the most frequent class, in percent."""
    return 100.0 * float(torch.bincount(labels).max()) / len(labels)
