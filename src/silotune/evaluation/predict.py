"""A model's predictions on rows: `logits`, or written `answers`; `measure` and `score` judge them by metric or loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from silotune.core.tensors import State
from silotune.data.batching import Batch, evaluation_batches
from silotune.data.metrics import LOSS_METRICS
from silotune.data.scores import LOSS_SCORES, TEXT_SCORES, exact_match, judge
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.evaluation.instance_vectors import weigh
from silotune.models.forward.generation import generate
from silotune.models.heads.lm import LanguageModelHead, prompt_rows
from silotune.training.prediction import PredictionContext, Predictor


def logits(context: PredictionContext, state: State, rows: TokenizedRows) -> Tensor:
    """Return the logits of all rows, shape (rows, outputs), in the rows' order."""
    predictor, result = _predictor(context, state, rows), torch.zeros(len(rows), rows.task.outputs)
    for batch in _batches(context, rows):
        result[batch.rows] = predictor.logits(batch).float().cpu()
    return result


@torch.no_grad()
def answers(context: PredictionContext, state: State, rows: TokenizedRows) -> list[str]:
    """Return the personalized model's answer to each row's prompt."""
    head = context.head
    assert isinstance(head, LanguageModelHead), "a generation task has a language-model head"
    weights = weigh(context, state, rows)
    mix = context.prediction_mix(context.place(state), None if weights is None else weights.alpha)
    return generate(context.backbone, prompt_rows(rows), mix, head.generation, context.rows_written)


def mean_loss(context: PredictionContext, state: State, rows: TokenizedRows) -> float:
    """Return the head's mean loss: over rows, or over the tokens of all responses."""
    predictor = _predictor(context, state, rows)
    losses, units = [], []
    for batch in _batches(context, rows):
        losses.append(predictor.loss(batch))
        own = context.head.loss_units(batch)
        units.append(len(batch) if own is None else own)
    means = torch.stack(losses).cpu().double()  # mps has no float64
    return float((means * torch.tensor(units, dtype=means.dtype)).sum() / sum(units))


def _predictor(context: PredictionContext, state: State, rows: TokenizedRows) -> Predictor:
    weights = weigh(context, state, rows)
    return Predictor(context, state, None if weights is None else weights.alpha)


def _batches(context: PredictionContext, rows: TokenizedRows) -> Iterator[Batch]:
    return evaluation_batches(rows, context.backbone.pad_id, context.backbone.call_cost, context.rows_scored)


@dataclass(frozen=True)
class Measured:
    """A model's scores on rows, in percent; or its loss, perplexity or error.

    `score` is by the task's metric, None without rows. If answers are options and the metric is another, `accuracy` is
    the share of answers that equal the expected option exactly.

    Args:
        score: by the task's metric.
        accuracy: see above.
        logits: of rows with labels or numbers, shape (rows, outputs).
        written: the answers to other rows, where the metric needs them.
        loss: the head's mean loss, where the metric needs it.
    """

    score: float | None
    accuracy: float | None = None
    logits: Tensor | None = field(default=None, repr=False, compare=False)
    written: list[str] | None = field(default=None, repr=False, compare=False)
    loss: float | None = field(default=None, compare=False)


def measure(
    context: PredictionContext, state: State, rows: TokenizedRows, metric: str | None = None, with_loss: bool = False
) -> Measured:
    """Score a model on rows, by the task's metric or another one; `with_loss` measures it beside written answers."""
    task = rows.task
    metric = metric or task.metric
    if not len(rows):
        return Measured(None)
    if metric in LOSS_METRICS:
        loss = mean_loss(context, state, rows)
        return Measured(LOSS_SCORES[metric](loss), loss=loss)
    if task.labeled:
        outputs = logits(context, state, rows)
        return Measured(judge(task, metric, outputs, rows.labels), logits=outputs)
    if rows.pairs:
        raise InputError(f"metric of task {task.name!r}: preference pairs are judged by loss, not by {metric}")
    written, expected = answers(context, state, rows), rows.answers or []
    result = TEXT_SCORES[metric](written, expected)
    picked = rows.options and TEXT_SCORES[metric] is not exact_match
    right = TEXT_SCORES["accuracy"](written, expected) if picked else None
    return Measured(result, right, written=written, loss=mean_loss(context, state, rows) if with_loss else None)


def score(context: PredictionContext, state: State, rows: TokenizedRows) -> float | None:
    """Return the task's metric over the rows; None without rows."""
    return measure(context, state, rows).score
