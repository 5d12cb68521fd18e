"""Tag the words of a text by one linear layer over the state of each word's first token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from silotune.config.head import HeadConfig
from silotune.core.tensors import Tensors
from silotune.data.kinds.entities import words_in
from silotune.data.long_texts import CUT, LongTexts, Offsets, encode
from silotune.data.rows import Row
from silotune.data.targets import target_tensor
from silotune.data.tasks import Task
from silotune.data.tokenized import READ_POSITIONS, READ_ROWS, Inputs, TokenizedRows
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.forward.views import HeadReading, View
from silotune.models.heads.base import Head, TokenizeRows
from silotune.models.heads.classifier import apply_linear, draw_outputs


class EntitiesHead(Head):
    """Marks spans; `<task>.out` has the shape (tags, hidden), with a bias. Contrasts of methods read the mean state."""

    name = "entities"
    task_kind = "entities"
    by_position = True
    reads_windows = True
    pooling = "mean"

    @override
    def check(self, backbone: Backbone, tasks: Iterable[Task]) -> None:
        """Refuse tokenizers that do not say where tokens stand, and encoder–decoders."""
        if not backbone.tokenizer.is_fast:
            kind = type(backbone.tokenizer).__name__
            raise InputError(
                f"head=entities: the tokenizer of {backbone.name!r} ({kind}) does not say where its tokens stand in a "
                "text; allowed: backbones with a fast tokenizer"
            )
        if backbone.base.config.is_encoder_decoder:
            raise InputError(f"head=entities: {backbone.name!r} is an encoder–decoder; allowed: encoders and decoders")

    @override
    def row_tokenizer(self, backbone: Backbone, max_length: int) -> TokenizeRows:
        """Return an `EntityTokenizer`."""
        return EntityTokenizer(backbone.tokenizer, max_length, self.long_texts)

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        return draw_outputs(backbone, tasks, generator)

    @override
    def description(self, config: HeadConfig, task: Task) -> dict[str, Any]:
        return {
            "tags": ["O", *(f"{letter}-{label}" for label in task.labels for letter in "BI")],
            "computes": "logits of a token's tags = out.weight · x + out.bias, where x is its last layer's state; a "
            "word has the tag of its first token",
        }

    @override
    def reading(self, backbone: Backbone, task: Task) -> HeadReading:
        """Read the state of each word's first token, flat, shape (words, hidden)."""

        def read(states: Tensor, inputs: Inputs, plan: ForwardPlan) -> Tensor:
            return states[inputs[READ_ROWS], inputs[READ_POSITIONS]]

        return read

    @override
    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """Compute the logits of words' tags, flat, shape (words, tags)."""
        return apply_linear(tensors, f"{task.name}.out", view[self.name])


class EntityTokenizer:
    """Tokenizes rows for a head that reads a state for each word: its first token's.

    The tokenizer is a fast one, which says where a token stands in the text.
    """

    def __init__(self, tokenizer: Any, max_length: int, long: LongTexts = CUT) -> None:
        self._tokenizer, self._max_length, self._long = tokenizer, max_length, long

    def __call__(self, task: Task, rows: Sequence[Row]) -> TokenizedRows:
        """Tokenize rows, cut at the maximum length, behind which words are not read, or in windows."""
        targets = target_tensor(task, rows)
        if not rows:
            return TokenizedRows(task, [], None, targets, reads=[])
        encoded = encode(self._tokenizer, [[row.texts[0] for row in rows]], self._max_length, self._long, offsets=True)
        reads = []
        for row, offsets, own in zip(rows, encoded.offsets, targets, strict=True):
            places = best_places(words_in(row), offsets)
            for word, place in enumerate(places):
                if place is None:
                    own[word] = -1 - own[word]
            reads.append([place for place in places if place is not None])
        return TokenizedRows(task, encoded.ids, encoded.types, targets, reads=reads, windows=encoded.windows)


def best_places(words: Sequence[Sequence[int]], windows: Sequence[Offsets]) -> list[int | None]:
    """Return the token at which each word is read: its first, in the window with most tokens on the side with fewer.

    Tokens are counted over all windows, given by their tokens' offsets; of equal windows it is the first.
    """
    best: list[int | None] = [None] * len(words)
    around, first, start = [-1] * len(words), dict[int, tuple[int, int]](), 0
    for offsets in windows:
        for word, place in enumerate(first_tokens(words, offsets)):
            if place is None or first.setdefault(word, offsets[place]) != offsets[place]:
                continue  # a window that begins within a word has not its first token
            if (room := min(place, len(offsets) - 1 - place)) > around[word]:
                best[word], around[word] = start + place, room
        start += len(offsets)
    return best


def first_tokens(words: Sequence[Sequence[int]], offsets: Sequence[tuple[int, int]]) -> list[int | None]:
    """Return for each word, given by its start and end, the first token that covers a part of it; None if none does."""
    places: list[int | None] = []
    token = 0
    for start, end, *_ in words:
        while token < len(offsets) and (offsets[token][0] == offsets[token][1] or offsets[token][1] <= start):
            token += 1
        places.append(token if token < len(offsets) and offsets[token][0] < end else None)
    return places
