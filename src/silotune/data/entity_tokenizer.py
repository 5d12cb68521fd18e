"""Tokenize rows with marked spans, and find the token at which each word is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from silotune.data.kinds.entities import words_in
from silotune.data.rows import Row
from silotune.data.targets import target_tensor
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows


class EntityTokenizer:
    """Tokenizes rows for a head that reads a state for each word: its first token's.

    The tokenizer is a fast one, which says where a token stands in the text.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self._tokenizer, self._max_length = tokenizer, max_length

    def __call__(self, task: Task, rows: Sequence[Row]) -> TokenizedRows:
        """Tokenize rows, truncated to the maximum length; words behind it are not read."""
        targets = target_tensor(task, rows)
        if not rows:
            return TokenizedRows(task, [], None, targets, reads=[])
        encoded = self._tokenizer(
            [row.texts[0] for row in rows],
            truncation=True,
            max_length=self._max_length,
            return_offsets_mapping=True,
        )
        reads = []
        for row, offsets, own in zip(rows, encoded["offset_mapping"], targets, strict=True):
            places = first_tokens(words_in(row), offsets)
            _mark_unread(own, places)
            reads.append([place for place in places if place is not None])
        return TokenizedRows(task, encoded["input_ids"], encoded.get("token_type_ids"), targets, reads=reads)


def first_tokens(words: Sequence[Sequence[int]], offsets: Sequence[tuple[int, int]]) -> list[int | None]:
    """Return for each word, given by its start and end, the first token that covers a part of it; None if none does."""
    places: list[int | None] = []
    token = 0
    for start, end, *_ in words:
        while token < len(offsets) and (offsets[token][0] == offsets[token][1] or offsets[token][1] <= start):
            token += 1
        places.append(token if token < len(offsets) and offsets[token][0] < end else None)
    return places


def _mark_unread(targets: Tensor, places: Sequence[int | None]) -> None:
    for word, place in enumerate(places):
        if place is None:
            targets[word] = -1 - targets[word]
