"""Bring a text into Unicode's form NFC and map places in it to places in the text as it was written."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import cache


class Composed:
    """A text in NFC, with the way back.

    Attributes:
        text: the text in NFC.
    """

    def __init__(self, written: str) -> None:
        self.text = unicodedata.normalize("NFC", written)
        self._origins: list[tuple[int, int]] | None = None
        if self.text != written:
            self._origins = []
            start = 0
            for piece in _pieces(written):
                end = start + len(piece)
                self._origins += [(start, end)] * len(unicodedata.normalize("NFC", piece))
                start = end

    def origin(self, start: int, end: int) -> tuple[int, int]:
        """Return the place in the text as written of the characters from `start` to before `end`."""
        if self._origins is None:
            return start, end
        return self._origins[start][0], self._origins[end - 1][1]

    def place(self, start: int, end: int) -> tuple[int, int]:
        """Return the place of a piece of the text as written; the other way of `origin`."""
        if self._origins is None:
            return start, end
        inside = [at for at, (first, last) in enumerate(self._origins) if first < end and last > start]
        return inside[0], inside[-1] + 1


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of a text that NFC changes apart from one another."""
    start = 0
    for place in range(1, len(text)):
        if not text[place].isascii() and _attaches(text[place]):
            continue
        yield text[start:place]
        start = place
    yield text[start:]


@cache
def _attaches(character: str) -> bool:
    """Return whether NFC may join a character to the one before it."""
    first = unicodedata.normalize("NFD", character)[0]
    syllable = "\u1161" <= first <= "\u1175" or "\u11a8" <= first <= "\u11c2"  # Hangul vowels and final consonants
    return bool(unicodedata.combining(first)) or syllable or first in _seconds()


@cache
def _seconds() -> frozenset[str]:
    """Return the characters that are the second one of a composed pair."""
    pairs = (unicodedata.decomposition(chr(code)).split() for code in range(0xC0, 0x20000))
    return frozenset(chr(int(pair[1], 16)) for pair in pairs if len(pair) == 2 and not pair[0].startswith("<"))
