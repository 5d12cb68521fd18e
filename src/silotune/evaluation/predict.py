"""A model's predictions on rows: `logits`, or written `answers`; `measure` and `score` judge them by metric or loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from silotune.core.tensors import State
from silotune.data.batching import Batch, evaluation_batches
from silotune.data.scores import LOSS_SCORES, TEXT_SCORES, exact_match, judge
from silotune.data.tasks import LOSS_METRICS
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
def answers(
    context: PredictionContext, state: State, rows: TokenizedRows, follow: Callable[[str], None] | None = None
) -> list[str]:
    """Return the personalized model's answer to each row's prompt; `follow` is passed on to `generate`."""
    head = context.head
    assert isinstance(head, LanguageModelHead), "a generation task has a language-model head"
    weights = weigh(context, state, rows)
    mix = context.prediction_mix(context.place(state), None if weights is None else weights.alpha)
    return generate(context.backbone, prompt_rows(rows), mix, head.generation, context.rows_written, follow)


@torch.no_grad()
def picked_answers(context: PredictionContext, state: State, rows: TokenizedRows) -> list[str]:
    """Return for each row the one of its `choices` whose tokens have the greatest mean log-likelihood."""
    choices, config = rows.choices or [], context.backbone.base.config
    owners = [row for row, options in enumerate(choices) for _ in options]
    tokenizer: Any = context.backbone.tokenizer
    texts = [option for options in choices for option in options]
    answers = tokenizer(texts, add_special_tokens=False)["input_ids"]
    asked = [prompt_rows(rows).ids[row] for row in owners]
    labels = torch.zeros(len(owners), dtype=torch.int64)
    if config.is_encoder_decoder:
        decoder = [[config.decoder_start_token_id, *ids[:-1]] for ids in answers]
        reads = [list(range(len(ids))) for ids in answers]
        candidates = TokenizedRows(rows.task, asked, None, labels, decoder, reads, answers)
    else:
        ids = [[*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)]
        reads = [list(range(len(prompt) - 1, len(whole) - 1)) for prompt, whole in zip(asked, ids, strict=True)]
        candidates = TokenizedRows(rows.task, ids, None, labels, reads=reads, targets=answers)
    weights = weigh(context, state, rows)
    predictor = Predictor(context, state, None if weights is None else weights.alpha[torch.tensor(owners)])
    likely = torch.zeros(len(owners))
    for batch in _batches(context, candidates):
        likely[batch.rows] = predictor.likelihoods(batch).float().cpu()
    of_rows = torch.split(likely, [len(options) for options in choices])
    return [options[int(found.argmax())] for options, found in zip(choices, of_rows, strict=True)]


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
    """A model's scores on rows: a percentage, or a loss, perplexity or error.

    `score` is by the task's metric; None without rows. If answers are options and the metric is another, `accuracy`
    is the share of answers that equal the expected option exactly. Rows with labels or numbers have `logits`, shape
    (rows, outputs); others have `written` answers if the metric needs them. `loss` is the head's mean, if computed.
    """

    score: float | None
    accuracy: float | None = None
    logits: Tensor | None = field(default=None, repr=False, compare=False)
    written: list[str] | None = field(default=None, repr=False, compare=False)
    loss: float | None = field(default=None, compare=False)


def measure(
    context: PredictionContext,
    state: State,
    rows: TokenizedRows,
    metric: str | None = None,
    with_loss: bool = False,
    known: Tensor | None = None,
) -> Measured:
    """Score a model on rows, by the task's metric or the given one.

    `with_loss` adds the loss of written answers; `known` are the rows' logits, if they are computed already.
    """
    task = rows.task
    metric = metric or task.metric
    if not len(rows):
        return Measured(None)
    if metric in LOSS_METRICS:
        loss = mean_loss(context, state, rows)
        return Measured(LOSS_SCORES[metric](loss), loss=loss)
    if task.labeled:
        outputs = logits(context, state, rows) if known is None else known
        return Measured(judge(task, metric, outputs, rows.labels), logits=outputs)
    if rows.pairs:
        raise InputError(f"metric of task {task.name!r}: preference pairs are judged by loss, not by {metric}")
    head = context.head
    assert isinstance(head, LanguageModelHead), "a generation task has a language-model head"
    picks = rows.choices is not None and head.picks
    written, expected = (picked_answers if picks else answers)(context, state, rows), rows.answers or []
    result = TEXT_SCORES[metric](written, expected)
    picked = rows.options and TEXT_SCORES[metric] is not exact_match
    right = TEXT_SCORES["accuracy"](written, expected) if picked else None
    return Measured(result, right, written=written, loss=mean_loss(context, state, rows) if with_loss else None)


def score(context: PredictionContext, state: State, rows: TokenizedRows) -> float | None:
    """Return the task's metric over the rows; None without rows."""
    return measure(context, state, rows).score
