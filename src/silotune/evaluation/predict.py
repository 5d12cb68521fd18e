"""Predictions of a personalised model over rows."""

from __future__ import annotations

import torch
from torch import Tensor

from silotune.data.batching import TokenisedRows, in_order
from silotune.evaluation.metrics import METRICS
from silotune.parts import State
from silotune.silo import LocalTraining

BATCH = 64


def logits(training: LocalTraining, state: State, rows: TokenisedRows) -> Tensor:
    """Logits of all rows, shape (rows, classes), in the rows' order."""
    pad = int(training.backbone.tokenizer.pad_token_id or 0)
    result = torch.zeros(len(rows), len(rows.task.labels))
    for batch in in_order(rows, BATCH, pad):
        result[batch.rows] = training.logits(state, batch).float().cpu()
    return result


def score(training: LocalTraining, state: State, rows: TokenisedRows) -> float | None:
    """The task's metric over the rows, in percent; None without rows."""
    if not len(rows):
        return None
    return METRICS[rows.task.metric](logits(training, state, rows).argmax(-1), rows.labels)
