"""`rows_behind`: over how many rows a score is spread, which scales the noise that hides one of them."""

from __future__ import annotations

import math

from torch import Tensor

from silotune.data.tasks import Task

_CORRELATIONS = ("pearson", "spearman", "pearson_spearman")


def rows_behind(task: Task, labels: Tensor) -> int:
    """Return a number of rows n, so that one row changes the score of a task by at most about 1/n of 100 %.

    A model can answer one text alone otherwise than all others. With P rows of the rarest label this changes F1 by up
    to 2/(P+1), balanced accuracy and AUROC by 1/P, Matthews' correlation by 1/√P, and a correlation with numbers by
    1/√rows, or more if the row's number is an outlier. All other scores are means over rows.

    Args:
        task: whose metric is asked for.
        labels: of the split's rows: classes or numbers, shape (rows,), or 1 where a row has a label, of shape
            (rows, labels).

    Returns:
        At least 1, at most the number of rows; losses and errors, which have no bound, count as means.
    """
    rows, metric = len(labels), task.metric
    if metric in _CORRELATIONS:
        spread = math.sqrt(rows)
    elif metric == "f1":
        spread = int((labels == task.positive_index).sum()) / 2
    elif metric == "macro_f1":
        spread = _rarest(task, labels) / 2
    elif metric == "micro_f1":
        spread = int(labels.sum()) / 2
    elif metric in ("balanced_accuracy", "auroc"):
        spread = _rarest(task, labels)
    elif metric == "mcc":
        spread = math.sqrt(_rarest(task, labels))
    else:
        spread = rows
    return min(max(int(spread), 1), max(rows, 1))


def _rarest(task: Task, labels: Tensor) -> int:
    """Return how many rows have the rarest label that occurs, or lack it, if rows have several and fewer lack it."""
    if labels.dim() == 2:
        counts = labels.sum(0).long()
        counts = counts.minimum(len(labels) - counts)
    else:
        counts = labels.bincount(minlength=len(task.labels))
    occurring = counts[counts > 0]
    return int(occurring.min()) if len(occurring) else 0
