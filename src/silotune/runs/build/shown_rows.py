"""`show_rows`: token by token, what a silo's rows become and what is trained (`silotune data`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from silotune.data.generation_rows import row_format
from silotune.data.row_checks import describe_rows
from silotune.data.rows import SiloData, known_text
from silotune.data.tasks import KINDS
from silotune.data.tokenized import TokenizedRows
from silotune.models.heads.base import TokenizeRows


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
    labeled = KINDS[task.kind].replace("texts", "text pairs" if len(row.texts) > 1 else "texts")
    return {
        "task": task.name,
        "format": row_format(row) if task.kind == "generation" else labeled,
        "labels": list(task.labels),
        "metric": task.metric,
        "positive": task.positive,
        "rows": silo.splits.counts(),
        **described,
    }


def show_rows(tokenizer: Any, tokenize: TokenizeRows, silo: SiloData, number: int) -> list[ShownRow]:
    """Tokenize a silo's first training rows as training does.

    Args:
        tokenizer: the backbone's tokenizer.
        tokenize: the head's function that tokenizes rows.
        silo: the silo.
        number: how many rows.
    """
    rows = silo.splits.train[:number]
    tokenized = tokenize(silo.task, rows)
    shown = []
    for place, row in enumerate(rows):
        texts = [f"{role}: {content}" for role, content in row.turns] or [text for text in row.texts if text]
        shown.append(ShownRow(texts, known_text(silo.task, row), _tokens(tokenizer, tokenized, place)))
    return shown


def _tokens(tokenizer: Any, rows: TokenizedRows, place: int) -> list[ShownToken]:
    """Return the tokens of one row.

    In an encoder–decoder, the decoder's targets follow the encoder's tokens; of a preference pair, the rejected answer
    follows the chosen one, each behind the prompt.
    """
    if rows.pairs:
        chosen, rejected = rows.sequences([place])
        return [*_sequence(tokenizer, rows, chosen, "chosen"), *_sequence(tokenizer, rows, rejected, "rejected")]
    return _sequence(tokenizer, rows, place, "text")


def _sequence(tokenizer: Any, rows: TokenizedRows, place: int, part: str) -> list[ShownToken]:
    """Return the tokens of one sequence of token ids; `part` names it in a decoder-only model or an encoder."""
    ids = rows.ids[place]
    if rows.decoder is not None:
        assert rows.targets is not None, "rows for a decoder have targets"
        targets = rows.targets[place]
        return [
            *_shown(tokenizer, ids, "encoder", [False] * len(ids)),
            *_shown(tokenizer, targets, "decoder", [True] * len(targets)),
        ]
    trained = {read + 1 for read in rows.reads[place]} if rows.reads is not None and rows.targets is not None else set()
    return _shown(tokenizer, ids, part, [position in trained for position in range(len(ids))])


def _shown(tokenizer: Any, ids: Sequence[int], part: str, trained: Sequence[bool]) -> list[ShownToken]:
    return [
        ShownToken(token, str(tokenizer.decode([token])), part, flag) for token, flag in zip(ids, trained, strict=True)
    ]
