"""`judge` scores a head's logits by a task's metric, whatever its kind; `all_scores` by all; `constant_score`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from silotune.data.label_set_scores import label_set_scores
from silotune.data.metrics import METRICS, Classified, majority_score
from silotune.data.number_scores import number_scores
from silotune.data.tasks import Task


def judge(task: Task, metric: str, logits: Tensor, targets: Tensor) -> float | None:
    """Return the score of logits.

    Args:
        task: the rows' task; not one of generation.
        metric: one of its metrics, but no loss.
        logits: shape (rows, outputs).
        targets: as `target_tensor` (`data/targets.py`) makes them.

    Returns:
        The score; None where it is not defined.
    """
    if task.kind == "classification":
        return METRICS[metric](Classified(logits, targets, task.positive_index))
    return all_scores(task, logits, targets)[metric]


def all_scores(task: Task, logits: Tensor, targets: Tensor) -> dict[str, float | None]:
    """Return the scores by all metrics of numbers or sets of labels; arguments as for `judge`."""
    return {name: _defined(float(values[0])) for name, values in resampled_scores(task, logits, targets).items()}


def resampled_scores(task: Task, logits: Tensor, targets: Tensor, drawn: Any = None) -> Mapping[str, Any]:
    """Return metric → scores of resamples of the rows, shape (resamples,); NaN where a score is not defined.

    Args:
        task: the rows' task: a regression, or one of rows with several labels.
        logits: shape (rows, outputs).
        targets: as for `judge`.
        drawn: how often each row counts, shape (resamples, rows); None: each once.
    """
    if task.kind == "regression":
        return number_scores(logits[:, 0].double().numpy(), targets.double().numpy(), drawn)
    return label_set_scores(logits.double().numpy(), targets.numpy(), drawn)


def constant_score(task: Task, targets: Tensor) -> float | None:
    """Return the score of the best constant answer.

    It is the most frequent class (F1 is 0 if that is not the positive one), the mean of numbers, or the labels that
    most rows have.
    """
    if task.kind == "classification":
        return majority_score(task.metric, targets, task.positive_index)
    if task.kind == "regression":
        return judge(task, task.metric, targets.mean().expand(len(targets), 1), targets)
    return judge(task, task.metric, (targets.mean(0) - 0.5).expand(len(targets), -1), targets)


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value
