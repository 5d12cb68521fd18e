"""Read texts of more tokens than a row may have: cut, in windows that overlap, or not at all (`data.long_texts`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Literal

from silotune.errors import InputError

Offsets = list[tuple[int, int]]
"""First character of each token, and the one behind its last."""


@dataclass(frozen=True)
class LongTexts:
    """What becomes of a text that is longer than a row may be.

    Args:
        reads: `cut` at the longest length, in `windows` of this length, or `refuse`.
        overlap: tokens that a window has in common with the one before; None: a quarter of its length.
        per_row: the most windows of a row in one round of training.
    """

    reads: Literal["cut", "windows", "refuse"] = "cut"
    overlap: int | None = None
    per_row: int = 4

    @property
    def in_windows(self) -> bool:
        """Whether rows are read in windows."""
        return self.reads == "windows"

    def common(self, max_length: int) -> int:
        """Return the tokens that windows of a length have in common."""
        return max_length // 4 if self.overlap is None else self.overlap


CUT = LongTexts()
"""Texts are cut."""


@dataclass(frozen=True)
class Encoded:
    """Texts as tokens, one after the other; those of a text read in windows lie behind one another, window by window.

    Args:
        ids: token ids of each text.
        types: segment ids of each text, if the tokenizer gives some.
        windows: numbers of tokens of each text's windows; None where texts are not read in windows.
        offsets: for each window of each text its tokens' offsets; empty unless they are wanted.
    """

    ids: list[list[int]]
    types: list[list[int]] | None
    windows: list[list[int]] | None
    offsets: list[list[Offsets]]


def encode(
    tokenizer: Any, columns: Sequence[Sequence[str]], max_length: int, long: LongTexts, offsets: bool = False
) -> Encoded:
    """Tokenize texts, or pairs of texts (two `columns`), to at most `max_length` tokens a text or window."""
    windows = long.in_windows
    if windows:
        _check_windows(tokenizer, len(columns), max_length, long)
    more = {"stride": long.common(max_length), "return_overflowing_tokens": True} if windows else {}
    cut = {} if long.reads == "refuse" else {"truncation": True, "max_length": max_length}
    encoding = tokenizer(*map(list, columns), **cut, **more, **({"return_offsets_mapping": True} if offsets else {}))
    ids, types, places = encoding["input_ids"], encoding.get("token_type_ids"), encoding.get("offset_mapping", [])
    if not windows:
        if long.reads == "refuse":
            _refuse([len(own) for own in ids], max_length)
        return Encoded(ids, types, None, [[own] for own in places])
    owners = encoding["overflow_to_sample_mapping"]

    def grouped(of_windows: Sequence[Any]) -> list[list[Any]]:
        pairs = zip(owners, of_windows, strict=True)
        return [[own for _, own in of_text] for _, of_text in groupby(pairs, lambda pair: pair[0])]

    joined = [
        [[*chain.from_iterable(of_text)] for of_text in grouped(each)] for each in (ids, types) if each is not None
    ]
    lengths = [[*map(len, of_text)] for of_text in grouped(ids)]
    return Encoded(joined[0], joined[1] if types is not None else None, lengths, grouped(places) if offsets else [])


def _check_windows(tokenizer: Any, columns: int, max_length: int, long: LongTexts) -> None:
    """Refuse windows of pairs, tokenizers that make none, and windows that have all in common."""
    key = "data.long_texts=windows"
    if columns > 1:
        raise InputError(f"{key}: a row is a pair of texts; allowed: cut or refuse")
    if not tokenizer.is_fast:
        raise InputError(f"{key}: the tokenizer ({type(tokenizer).__name__}) is not a fast one; allowed: cut or refuse")
    room = max_length - tokenizer.num_special_tokens_to_add()
    if long.common(max_length) >= room:
        raise InputError(
            f"data.window_overlap={long.common(max_length)}: a window of {max_length} tokens (train.max_length) has "
            f"{room} of its text; allowed: less than {room}"
        )


def _refuse(lengths: Sequence[int], max_length: int) -> None:
    long = [length for length in lengths if length > max_length]
    if long:
        raise InputError(
            f"{len(long)} of {len(lengths)} rows have more than {max_length} tokens (train.max_length), the longest "
            f"{max(long)}; data.long_texts=refuse; allowed: a longer train.max_length, or cut or windows"
        )
