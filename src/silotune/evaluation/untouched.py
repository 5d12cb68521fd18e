"""Score the backbone without any trained part, as it answers by itself or after a few training rows (k-shot)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from silotune.config import Config
from silotune.data.chat_template import ChatTemplate
from silotune.data.generation_tokenizer import GenerationTokenizer
from silotune.data.rows import ASSISTANT, Row, SiloData, Turn
from silotune.data.tasks import Task
from silotune.data.templates import Texts, join_lines
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.evaluation.baselines import MOST_SILOS
from silotune.evaluation.predict import Measured, measure
from silotune.methods.base import PredictionMix
from silotune.methods.parts import HEAD, Part, Scope
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.stored_model import is_causal
from silotune.models.heads import Head, LanguageModelHead, VerbalizerHead
from silotune.models.heads.base import TokenizeRows
from silotune.models.heads.lm import prompt_rows
from silotune.training.federation import Federation
from silotune.training.prediction import PredictionContext

UNTOUCHED, SHOWN = "untouched", "shown"
"""Keys of the baselines: the backbone as it is, and after `evaluation.shots` rows."""

_known: dict[bytes, float | None] = {}
"""Digest of model, head and token ids → score, kept in a process: runs that are compared have the same rows."""


def without_training(federation: Federation) -> None:
    """Let all silos of a federation answer with the backbone alone, if a run has no rounds and starts from nothing."""
    check_untouched(federation.config, federation.context.head)
    if scores_backbone(federation.config):
        federation.context.prediction = PredictionMix({}, federation.context.prediction.head)


def scores_backbone(config: Config) -> bool:
    """Return whether a run scores the untouched backbone: with `start`, a run without rounds scores that model."""
    return config.work == "scoring" and config.start is None


def check_untouched(config: Config, head: Head) -> None:
    """Refuse a run that would score a head of random tensors."""
    if scores_backbone(config) and head.has_tensors:
        raise InputError(
            f"rounds=0: scores the untouched backbone, and head={head.name} has tensors that no round has trained; "
            "allowed: start=RUN, which is then scored, head=lm or verbalizer, or rounds"
        )


def measure_untouched(context: PredictionContext, rows: TokenizedRows, with_loss: bool = False) -> Measured:
    """Score the backbone without any trained part on rows; its head has no tensors."""
    alone = PredictionContext(
        context.backbone,
        {HEAD: Part(context.head, Scope.SHARED)},
        PredictionMix({}),
        context.head,
        method="untouched",
        max_length=context.max_length,
        rows_scored=context.rows_scored,
        rows_written=context.rows_written,
    )
    return measure(alone, {HEAD: {}}, rows, with_loss=with_loss)


def untouched_baselines(
    context: PredictionContext,
    silos: Sequence[SiloData],
    shots: int,
    central: bool,
    tokenized: Mapping[str, TokenizedRows] = {},
) -> dict[str, Any]:
    """Score the backbone alone on silos' test rows, in the form of `baselines`.

    With `shots`, a second baseline has so many training rows before each question. There are no scores where the head
    has tensors of its own, or there are more than `MOST_SILOS` silos. Test rows may be `tokenized` already, by silo.
    """
    if context.head.has_tensors or (len(silos) > MOST_SILOS and not central):
        return {"silos": {}, "global": None}
    tokenize = context.head.row_tokenizer(context.backbone, context.max_length)
    result = {}
    for silo in silos[:1] if central else silos:
        if not silo.splits.test:
            continue
        rows = tokenized[silo.name] if silo.name in tokenized else tokenize(silo.task, silo.splits.test)
        own = silo.weights.get("test")
        shares = None if central or own is None else torch.tensor(own, dtype=torch.float64)
        scores = {UNTOUCHED: _score(context, replace(rows, shares=shares))}
        if shots:
            after_shown = with_shots(context, silo.task, silo.splits.train[:shots])
            scores[SHOWN] = _score(context, replace(after_shown(silo.task, silo.splits.test), shares=shares))
        result[silo.name] = scores
    return {"silos": {}, "global": next(iter(result.values()), None)} if central else {"silos": result, "global": None}


def _score(context: PredictionContext, rows: TokenizedRows) -> float | None:
    """Return the score of the backbone alone; a language model's is kept."""
    backbone, head = context.backbone, context.head
    if not isinstance(head, LanguageModelHead) or backbone.fingerprint is None:
        return measure_untouched(context, rows).score
    about = [
        backbone.fingerprint,
        backbone.precision,
        backbone.quantization,
        head.name,
        repr(head.generation),
        head.picks,
    ]
    questions = [rows.task.fields(), prompt_rows(rows).ids, rows.answers, rows.choices]
    key = hashlib.sha256(json.dumps([about, questions]).encode()).digest()
    if key not in _known:
        _known[key] = measure_untouched(context, rows).score
    return _known[key]


def with_shots(context: PredictionContext, task: Task, shots: Sequence[Row]) -> TokenizeRows:
    """Return a function that tokenizes rows with answered ones before each question.

    A chat template gets them as turns before the question, another template as filled texts with empty lines between,
    and label words as filled lines.
    """
    if not shots:
        raise InputError("evaluation.shots: there are no training rows to show")
    head, backbone = context.head, context.backbone
    tokenize = head.row_tokenizer(backbone, context.max_length)
    if isinstance(head, VerbalizerHead):
        longest = len(shots) * context.max_length
        _check_room(backbone, len(shots), context.max_length + longest)
        after = head.after(shots, task, is_causal(backbone.base.config))
        return after.row_tokenizer(backbone, context.max_length + longest)
    if not isinstance(tokenize, GenerationTokenizer) or tokenize.pairs:
        raise InputError(f"evaluation.shots: head={head.name} shows no rows; allowed: head=lm or verbalizer, or 0")
    template = tokenize.template
    more = sum(map(len, tokenize(task, shots).ids)) + 2 * len(shots)
    longer = replace(tokenize, room=tokenize.room + more, max_length=tokenize.max_length + more)
    _check_room(backbone, len(shots), longer.room)
    if isinstance(template, ChatTemplate):
        before = [turn for row in shots for turn in (*_turns(row, system=False), (ASSISTANT, row.answer))]
        return lambda task, rows: longer(task, [_after(before, row) for row in rows])
    prefix = "".join(f"{template(row.texts)}{row.answer}\n\n" for row in shots)

    def fill(texts: Texts) -> str:
        return prefix + template(texts)

    return replace(longer, template=fill)


def _check_room(backbone: Backbone, shots: int, tokens: int) -> None:
    most = backbone.max_tokens
    if most is not None and tokens > most:
        raise InputError(
            f"evaluation.shots: {shots} rows take up to {tokens} tokens with a question, and the backbone reads {most}"
            "; give fewer"
        )


def _turns(row: Row, system: bool = True) -> list[Turn]:
    turns = list(row.turns) or [("user", join_lines(row.texts))]
    return turns if system or turns[0][0] != "system" else turns[1:]


def _after(before: Sequence[Turn], row: Row) -> Row:
    """Return a row whose conversation has other turns before its own, but behind a system turn."""
    turns = _turns(row)
    first = 1 if turns[0][0] == "system" else 0
    return replace(row, turns=(*turns[:first], *before, *turns[first:]))
