"""Predictions of a personalised model over rows."""

from __future__ import annotations

import torch
from torch import Tensor

from silotune.data.batching import TokenisedRows, in_order
from silotune.data.metrics import METRICS, TEXT_METRICS
from silotune.evaluation.instances import weigh
from silotune.generation import generate
from silotune.heads.lm import LanguageModelHead, prompt_rows
from silotune.parts import State
from silotune.training import LocalTraining

BATCH = 64


def logits(training: LocalTraining, state: State, rows: TokenisedRows) -> Tensor:
    """Logits of all rows, shape (rows, classes), in the rows' order."""
    pad = int(training.backbone.tokenizer.pad_token_id or 0)
    weights = weigh(training, state, rows)
    result = torch.zeros(len(rows), len(rows.task.labels))
    for batch in in_order(rows, BATCH, pad):
        alpha = None if weights is None else weights.alpha[batch.rows]
        result[batch.rows] = training.logits(state, batch, alpha).float().cpu()
    return result


@torch.no_grad()
def answers(training: LocalTraining, state: State, rows: TokenisedRows) -> list[str]:
    """What the personalised model writes to each row's prompt."""
    head = training.method.setting.head
    assert isinstance(head, LanguageModelHead), "a generation task has a language-model head"
    weights = weigh(training, state, rows)
    mix = training.method.prediction().mixed(None if weights is None else weights.alpha)
    return generate(training.backbone, prompt_rows(rows), training.resolve(mix, state, {}, {}), head.generation)


def score(training: LocalTraining, state: State, rows: TokenisedRows) -> float | None:
    """The task's metric over the rows, in percent; None without rows."""
    if not len(rows):
        return None
    if rows.task.kind == "generation":
        return TEXT_METRICS[rows.task.metric](answers(training, state, rows), rows.answers or [])
    return METRICS[rows.task.metric](logits(training, state, rows).argmax(-1), rows.labels)
