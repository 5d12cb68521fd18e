"""A model's predictions: a `Predictor` reads batches; `logits` and `answers` are of rows, `measure` and `score` judge.

Every command that predicts, from scores in training to `serve`, reads a model through its `Predictor`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from silotune.core.tensors import State
from silotune.data.batching import Batch, evaluation_batches
from silotune.data.scores import LOSS_SCORES, TEXT_SCORES, exact_match, judge
from silotune.data.tasks import LOSS_METRICS, Task
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.evaluation.instance_vectors import weigh
from silotune.methods.step import REFERENCE, head_tensors
from silotune.models.forward.generation import generate
from silotune.models.forward.mixing import MixEntry, fold_entries
from silotune.models.forward.row_mixes import sharing_key
from silotune.models.forward.view_program import ViewProgram
from silotune.models.forward.views import View
from silotune.models.heads import PLAIN
from silotune.models.heads.base import head_readings
from silotune.models.heads.lm import LanguageModelHead, prompt_rows
from silotune.training.prediction import PredictionContext


class Predictor:
    """One model on its backbone: the mix that answers, the head that reads it, and what they say about batches.

    Args:
        context: backbone, parts and head.
        state: the tensors of all parts, and the vectors of the silo's rows where texts are weighed by them.
    """

    def __init__(self, context: PredictionContext, state: State) -> None:
        self.context = context
        self.alpha: Tensor | None = None
        """The weight of each row of which batches are asked, shape (rows,), if the method weighs texts; see `of`."""
        self._unplaced, self._placed = state, context.place(state)
        self.head, self._tensors = context.answering, head_tensors(context.prediction.head, self._placed)

    @classmethod
    def of(cls, context: PredictionContext, state: State, rows: TokenizedRows) -> Self:
        """Return the predictor of batches of these rows."""
        predictor = cls(context, state)
        predictor.alpha = predictor.weigh(rows)
        return predictor

    @torch.no_grad()
    def weigh(self, rows: TokenizedRows) -> Tensor | None:
        """Return the weight of each row, shape (rows,), if the method weighs texts."""
        weights = weigh(self.context, self._unplaced, rows)
        return None if weights is None else weights.alpha

    def mix(self, alpha: Tensor | None = None) -> list[MixEntry]:
        """Return the parts that act on rows, with `alpha`, shape (rows,), if the method weighs texts.

        Where rows cannot share a forward, the weight of a single row is one number, which every tuner takes.
        """
        if alpha is None:
            return self._fixed_mix
        mix = self._mix(alpha)
        if len(alpha) > 1 or self.key is not None:
            return mix
        return [replace(part, weight=float(part.weight)) if part.by_row else part for part in mix]

    @cached_property
    def key(self) -> Hashable:
        """Rows of models with equal keys can share a forward; None: with no other model's rows."""
        half = None if self.context.prediction.weighting is None else torch.full((1,), 0.5)
        return sharing_key(self.context.backbone, self._mix(half))

    @cached_property
    def _fixed_mix(self) -> list[MixEntry]:
        return self._mix(None)

    @torch.no_grad()
    def _mix(self, alpha: Tensor | None) -> list[MixEntry]:
        return fold_entries(self.context.backbone, self.context.prediction_mix(self._placed, alpha))

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of a batch of one task, shape (rows, outputs), in the batch's order."""
        return self.logits_of(self._views(batch)["prediction"], batch.task)

    @torch.no_grad()
    def logits_of(self, view: View, task: Task) -> Tensor:
        """Return the logits of rows, shape (rows, outputs), from the view of them under the model's mix."""
        return self.head.logits(self._tensors, view, task)

    @torch.no_grad()
    def loss(self, batch: Batch) -> Tensor:
        """Return the head's loss of a batch, shape ()."""
        views = self._views(batch)
        if self.head.reads_reference:
            return self.head.referenced_loss(self._tensors, views["prediction"], views[REFERENCE], batch)
        return self.head.training_loss(self._tensors, views["prediction"], batch, PLAIN)

    @torch.no_grad()
    def likelihoods(self, batch: Batch) -> Tensor:
        """Return the mean log-likelihood of each row's targets under a language model, shape (rows,)."""
        sums, counts = self._views(batch)["prediction"][self.head.name].unbind(1)
        return -sums / counts

    def _views(self, batch: Batch) -> dict[str, View]:
        program = self._program if self.alpha is None else self._compile(self.alpha[batch.rows])
        return program(batch)

    @cached_property
    def _program(self) -> ViewProgram:
        return self._compile(None)

    @torch.no_grad()
    def _compile(self, alpha: Tensor | None) -> ViewProgram:
        """Compile the prediction's mix, and where the head wants it the backbone alone."""
        context = self.context
        mixes = {"prediction": self.mix(alpha)}
        if self.head.reads_reference:
            mixes[REFERENCE] = []
        return ViewProgram(
            context.backbone,
            [mixes],
            readings=partial(head_readings, [self.head], context.backbone, 0.0),
            activation_cache=context.cache,
            guard=context.guard,
            untouched=context.untouched,
        )


def logits(context: PredictionContext, state: State, rows: TokenizedRows) -> Tensor:
    """Return the logits of all rows, shape (rows, outputs), in the rows' order; flat where the head reads positions."""
    rows = rows if rows.sizes is None else replace(rows, sizes=None)  # each sequence has a line
    predictor, result = Predictor.of(context, state, rows), torch.zeros(len(rows), 0)
    flat: dict[int, Tensor] = {}
    for batch in _batches(context, rows):
        outputs, indices = predictor.logits(batch).float().cpu(), batch.rows.tolist()
        if predictor.head.by_position:
            assert rows.reads is not None, "the head's tokenizer says where it reads"
            flat |= zip(indices, torch.split(outputs, [len(rows.reads[row]) for row in indices]), strict=True)
        else:
            result = result if result.shape[1] else outputs.new_zeros(len(rows), *outputs.shape[1:])
            result[batch.rows] = outputs
    return torch.cat([flat[row] for row in range(len(rows))]) if flat else result


@torch.no_grad()
def answers(
    context: PredictionContext, state: State, rows: TokenizedRows, follow: Callable[[str], None] | None = None
) -> list[str]:
    """Return the personalized model's answer to each row's prompt; `follow` is passed on to `generate`."""
    head = context.head
    assert isinstance(head, LanguageModelHead), "a generation task has a language-model head"
    predictor = Predictor.of(context, state, rows)
    mix = predictor.mix(predictor.alpha)
    return generate(context.backbone, prompt_rows(rows), mix, head.generation, context.rows_written, follow)


@torch.no_grad()
def picked_answers(context: PredictionContext, state: State, rows: TokenizedRows) -> list[str]:
    """Return for each row the one of its `choices` whose tokens have the greatest mean log-likelihood."""
    choices, config = rows.choices or [], context.backbone.base.config
    owners = [row for row, options in enumerate(choices) for _ in options]
    tokenizer: Any = context.backbone.tokenizer
    texts = [option for options in choices for option in options]
    answers = tokenizer(texts, add_special_tokens=False)["input_ids"]
    prompts = [prompt_rows(rows).ids[row] for row in owners]
    labels = torch.zeros(len(owners), dtype=torch.int64)
    if config.is_encoder_decoder:
        decoder = [[config.decoder_start_token_id, *ids[:-1]] for ids in answers]
        reads = [list(range(len(ids))) for ids in answers]
        candidates = TokenizedRows(rows.task, prompts, None, labels, decoder, reads, answers)
    else:
        ids = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        reads = [list(range(len(prompt) - 1, len(whole) - 1)) for prompt, whole in zip(prompts, ids, strict=True)]
        candidates = TokenizedRows(rows.task, ids, None, labels, reads=reads, targets=answers)
    predictor = Predictor.of(context, state, rows)
    predictor.alpha = None if predictor.alpha is None else predictor.alpha[torch.tensor(owners)]
    likely = torch.zeros(len(owners))
    for batch in _batches(context, candidates):
        likely[batch.rows] = predictor.likelihoods(batch).float().cpu()
    of_rows = torch.split(likely, [len(options) for options in choices])
    return [options[int(scores.argmax())] for options, scores in zip(choices, of_rows, strict=True)]


def mean_loss(context: PredictionContext, state: State, rows: TokenizedRows) -> float:
    """Return the head's mean loss: over rows, or over the tokens of all responses."""
    predictor = Predictor.of(context, state, rows)
    losses, units = [], []
    for batch in _batches(context, rows):
        losses.append(predictor.loss(batch))
        own = context.head.loss_units(batch)
        units.append(len(batch) if own is None else own)
    means = torch.stack(losses).cpu().double()  # mps has no float64
    return float((means * torch.tensor(units, dtype=means.dtype)).sum() / sum(units))


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
    scores: Tensor | None = None,
) -> Measured:
    """Score a model on rows, by the task's metric or the given one.

    `with_loss` adds the loss of written answers; `scores` are the rows' logits, if they are computed already.
    """
    task = rows.task
    metric = metric or task.metric
    if not len(rows):
        return Measured(None)
    if rows.weights is not None and metric in LOSS_METRICS:
        return weighed(Measured(None, logits=logits(context, state, rows) if scores is None else scores), rows, metric)
    if metric in LOSS_METRICS:
        loss = mean_loss(context, state, rows)
        return Measured(LOSS_SCORES[metric](loss), loss=loss)
    if task.labeled:
        outputs = logits(context, state, rows) if scores is None else scores
        return Measured(judge(task, metric, outputs, rows.labels, rows.weights), logits=outputs)
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


def weighed(measured: Measured, rows: TokenizedRows, metric: str | None = None) -> Measured:
    """Judge a model's logits again, with these rows' weights; without weights or logits return what was measured."""
    task, outputs = rows.task, measured.logits
    metric = metric or task.metric
    if rows.weights is None or outputs is None:
        return measured
    if metric not in LOSS_METRICS:
        return replace(measured, score=judge(task, metric, outputs, rows.labels, rows.weights))
    losses = nn.functional.cross_entropy(outputs.double(), rows.labels, reduction="none")
    loss = float((losses * rows.weights).sum() / rows.weights.sum()) if rows.judges else None
    return replace(measured, score=None if loss is None else LOSS_SCORES[metric](loss), loss=loss)


def score(context: PredictionContext, state: State, rows: TokenizedRows) -> float | None:
    """Return the task's metric over the rows; None without rows."""
    return measure(context, state, rows).score
