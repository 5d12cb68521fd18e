"""Show counts and lengths of rows, and token by token how a row is read and trained (`silotune data`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from silotune.config import Config
from silotune.data.generation_rows import row_format
from silotune.data.long_texts import CUT
from silotune.data.row_checks import describe_rows, spread
from silotune.data.rows import SiloData, known_text
from silotune.data.tokenized import ANY_LENGTH, Cuts, TokenizedRows, count_cuts, cut_text
from silotune.errors import InputError
from silotune.models.backbone.loading import silence_transformers
from silotune.models.backbone.packages import model_source
from silotune.models.backbone.stored_model import hub_options
from silotune.models.heads.base import TokenizeRows
from silotune.runs.build.builder import prompt_room
from silotune.runs.build.resolve import make_method, with_chat_template, with_model_defaults

_MOST_ROWS = 10_000
"""Training rows of a silo that are tokenized, the first ones of the (shuffled) split."""


@dataclass(frozen=True)
class ShownToken:
    """One token: its id, its text, the model's input it belongs to, and whether the loss counts it."""

    id: int
    text: str
    input: str
    trained: bool


@dataclass(frozen=True)
class ShownRow:
    """One row: its texts as they are in the file, its label or answer, and the tokens it becomes."""

    texts: list[str]
    target: str
    tokens: list[ShownToken]


def describe_silo(silo: SiloData) -> dict[str, Any]:
    """Return a silo's task, format, metric and numbers of rows, and what its rows are like (`describe_rows`)."""
    row, task, described = silo.splits.train[0], silo.task, describe_rows(silo)
    labeled = task.rules.rows.replace("texts", "text pairs" if len(row.texts) > 1 else "texts")
    return {
        "task": task.name,
        "format": row_format(row) if not task.labeled else labeled,
        "labels": list(task.labels),
        "metric": task.metric,
        "positive": task.positive,
        "rows": silo.splits.counts(),
        **described,
    }


def show_rows(tokenizer: Any, tokenize: TokenizeRows, silo: SiloData, number: int) -> list[ShownRow]:
    """Tokenize a silo's first training rows as training does."""
    rows = silo.splits.train[:number]
    tokenized = tokenize(silo.task, rows)
    examples = []
    for place, row in enumerate(rows):
        texts = [": ".join(filter(None, turn)) for turn in row.turns] or [text for text in row.texts if text]
        texts = [*([f"tools: {row.tools}"] if row.tools else []), *texts]
        examples.append(ShownRow(texts, known_text(silo.task, row), _tokens(tokenizer, tokenized, place)))
    return examples


def _tokens(tokenizer: Any, rows: TokenizedRows, place: int) -> list[ShownToken]:
    """Return the tokens of one row.

    In an encoder–decoder, the decoder's targets follow the encoder's tokens; of a preference pair, the rejected answer
    follows the chosen one, each behind the prompt; of a query, its passage and its negatives follow.
    """
    if rows.sizes is not None:
        own = rows.sequences([place])
        parts = ["chosen", "rejected"] if rows.pairs else ["query", "passage", *["negative"] * len(own)]
        return [
            token for each, part in zip(own, parts, strict=False) for token in _sequence(tokenizer, rows, each, part)
        ]
    return _sequence(tokenizer, rows, place, "text")


def _sequence(tokenizer: Any, rows: TokenizedRows, place: int, part: str) -> list[ShownToken]:
    ids = rows.ids[place]
    if rows.decoder is not None:
        assert rows.targets is not None, "rows for a decoder have targets"
        targets = rows.targets[place]
        return [
            *_shown(tokenizer, ids, "encoder", [False] * len(ids)),
            *_shown(tokenizer, targets, "decoder", [True] * len(targets)),
        ]
    trained = {at + 1 for at in rows.reads[place]} if rows.reads is not None and rows.targets is not None else set()
    return _shown(tokenizer, ids, part, [position in trained for position in range(len(ids))])


def _shown(tokenizer: Any, ids: Sequence[int], part: str, trained: Sequence[bool]) -> list[ShownToken]:
    return [
        ShownToken(token, str(tokenizer.decode([token])), part, flag) for token, flag in zip(ids, trained, strict=True)
    ]


def token_lengths(config: Config, silos: Sequence[SiloData]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Count the tokens of training rows as they are trained, and return also a line on each silo whose prompts are cut.

    A silo has median, 95th percentile and maximum of tokens in a row as a whole, `cut`, the share of rows (in percent)
    that do not fit, and `room`, the most tokens of a prompt; where they are read in windows also `windows`
    (`_windows`). A line says, too, of which silos rows are refused.
    """
    silence_transformers()
    from transformers import AutoConfig, AutoTokenizer

    settings = config.backbone
    try:
        source = model_source(settings.name)
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **hub_options(settings))
        stored = AutoConfig.from_pretrained(source, **hub_options(settings))
    except (OSError, ValueError) as error:
        raise InputError(f"backbone={settings.name}: no tokenizer there, so tokens are not counted") from error
    config = with_model_defaults(config)
    head, length = make_method(with_chat_template(config, silos)).setting.head, config.train.max_length
    reader: Any = SimpleNamespace(tokenizer=tokenizer, base=SimpleNamespace(config=stored))  # without weights
    tokenize, whole = (head.with_long_texts(CUT).row_tokenizer(reader, most) for most in (length, ANY_LENGTH))
    room = prompt_room(head, reader, length)
    lengths: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    for silo in silos:
        rows = silo.splits.train[:_MOST_ROWS]
        cuts = count_cuts(silo.task, rows, tokenize, whole)
        lengths[silo.name] = {**(spread(cuts.lengths) or {}), "cut": 100 * cuts.fraction, "room": room}
        if head.long_texts.reads != "cut":
            try:
                inputs = head.row_tokenizer(reader, length)(silo.task, rows)
            except InputError as error:
                lines.append(f"silo {silo.name!r}, training rows: {error}")
                continue
            if head.long_texts.in_windows:
                lengths[silo.name]["windows"] = _windows(inputs, cuts, length, head.long_texts.per_row)
        if cuts.prompts:
            lines.append(cut_text(silo, cuts, length, room))
    return lengths, lines


def _windows(rows: TokenizedRows, cuts: Cuts, length: int, per_row: int) -> dict[str, float]:
    """Say what windows cost.

    Returns:
        The number of `rows` and of those that are `longer`; forward `passes` a row in predictions, and `trained` ones
        in training; and how many times as many tokens these are as if rows were cut (`work` and `trained_work`).
    """
    passes = [rows.passes(row) for row in range(len(rows))]
    trained = [min(own, per_row) for own in passes]
    once = sum(min(own, length) for own in cuts.lengths)
    tokens = [*map(len, rows.ids)]
    drawn = sum(own * few / all_ for own, few, all_ in zip(tokens, trained, passes, strict=True))
    return {
        "rows": len(rows),
        "longer": len(cuts.cut),
        "passes": sum(passes) / len(rows),
        "trained": sum(trained) / len(rows),
        "work": sum(tokens) / once,
        "trained_work": drawn / once,
    }
