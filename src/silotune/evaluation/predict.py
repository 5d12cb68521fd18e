"""Predicts rows with a silo's model (logits or written answers) and scores the predictions by the task's metric."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from silotune.core.tensors import State
from silotune.data.batching import evaluation_batches
from silotune.data.metrics import METRICS, TEXT_METRICS
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.instance_vectors import weigh
from silotune.models.forward.generation import generate
from silotune.models.heads.lm import LanguageModelHead, prompt_rows
from silotune.training.context import TrainingContext


def logits(context: TrainingContext, state: State, rows: TokenizedRows) -> Tensor:
    """Return the logits of all rows, shape (rows, classes), in the rows' order."""
    pad = context.backbone.pad_id
    weights = weigh(context, state, rows)
    placed = context.place(state)
    result = torch.zeros(len(rows), len(rows.task.labels))
    for batch in evaluation_batches(rows, pad, context.backbone.call_cost, context.rows_scored):
        alpha = None if weights is None else weights.alpha[batch.rows]
        result[batch.rows] = context.logits(placed, batch, alpha).float().cpu()
    return result


@torch.no_grad()
def answers(context: TrainingContext, state: State, rows: TokenizedRows) -> list[str]:
    """Return the personalized model's answer to each row's prompt."""
    head = context.method.setting.head
    assert isinstance(head, LanguageModelHead), "a generation task has a language-model head"
    weights = weigh(context, state, rows)
    mix = context.prediction_mix(context.place(state), None if weights is None else weights.alpha)
    return generate(context.backbone, prompt_rows(rows), mix, head.generation, context.rows_written)


@dataclass(frozen=True)
class Measured:
    """A model's scores on rows, in percent.

    `score` is by the task's metric, None without rows. If answers are options and the metric is another, `accuracy` is
    the share of answers that equal the expected option exactly.
    """

    score: float | None
    accuracy: float | None = None


def measure(context: TrainingContext, state: State, rows: TokenizedRows) -> Measured:
    """Score a model on rows."""
    task = rows.task
    if not len(rows):
        return Measured(None)
    if task.kind != "generation":
        return Measured(METRICS[task.metric](logits(context, state, rows).argmax(-1), rows.labels))
    written, expected = answers(context, state, rows), rows.answers or []
    result = TEXT_METRICS[task.metric](written, expected)
    picked = rows.options and task.metric != "accuracy"
    return Measured(result, TEXT_METRICS["accuracy"](written, expected) if picked else None)


def score(context: TrainingContext, state: State, rows: TokenizedRows) -> float | None:
    """Return the task's metric over the rows, in percent; None without rows."""
    return measure(context, state, rows).score
