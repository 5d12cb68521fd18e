"""Tokenize rows with marked spans, and find the token at which each word is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from silotune.data.kinds.entities import words_in
from silotune.data.long_texts import CUT, LongTexts, Offsets, encode
from silotune.data.rows import Row
from silotune.data.targets import target_tensor
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows


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
            _mark_unread(own, places)
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


def _mark_unread(targets: Tensor, places: Sequence[int | None]) -> None:
    for word, place in enumerate(places):
        if place is None:
            targets[word] = -1 - targets[word]
