"""Words, tags and spans: how marked texts are written in files, and how tags become spans."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from silotune.data.composed import Composed
from silotune.data.readers import Record
from silotune.data.rows import text_fault
from silotune.errors import InputError

WordSpan = tuple[int, int, int]
"""First word, last word and index of the label."""

Word = tuple[int, int, int]
"""Place of a word's first character in its text, place behind its last one, and its tag; see `tag_of`."""

Marked = tuple[int, int, str]
"""Place of a span's first character in its text, place behind its last one, and its label."""

TAG_COLUMNS = ("tags", "ner_tags")

SPAN_COLUMNS = ("spans", "entities", "label", "labels", "annotations")
"""Columns of spans: ours and Prodigy's, Doccano's two, Label Studio's two."""

_BEGIN, _ALONE, _LAST = "BUS", "US", "LEUS"
"""Letters of tags that begin a span, are one by themselves, or end one: BIO, IOB1, BILOU and BIOES together."""


@cache
def _word_pattern() -> Any:
    import regex  # type: ignore[import-untyped]

    alone = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"  # scripts without blanks
    return regex.compile(rf"(?V1)[{alone}]\p{{M}}*|[[\w\p{{M}}\u200c\u200d]--[{alone}]]+|[^\w\s]")


def words_of(text: str) -> list[tuple[int, int]]:
    """Return the places of a text's words and signs; in scripts without blanks each character is one."""
    return [match.span() for match in _word_pattern().finditer(text)]


def tag_of(label: int, begins: bool) -> int:
    """Return the tag of a word in a span: 1 + 2·label for its first word, 2 + 2·label for others; 0 is no span's."""
    return 1 + 2 * label + (not begins)


def spans_of(tags: Sequence[int]) -> list[WordSpan]:
    """Return the spans of words' tags; a tag that continues no span of its label begins one."""
    spans: list[WordSpan] = []
    for place, tag in enumerate(tags):
        label, continues = (tag - 1) // 2, tag > 0 and tag % 2 == 0
        if continues and spans and spans[-1][1:] == (place - 1, label):
            spans[-1] = spans[-1][0], place, label
        elif tag > 0:
            spans.append((place, place, label))
    return spans


def best_tags(scores: NDArray[Any]) -> list[int]:
    """Return the likeliest tags of a text's words among valid ones (Viterbi): a span's next word follows its first.

    Args:
        scores: logits or log-probabilities, shape (words, tags).
    """
    words, tags = scores.shape
    if not words:
        return []
    continues = np.array([tag > 0 and tag % 2 == 0 for tag in range(tags)])
    follows = np.zeros((tags, tags))
    for tag in np.flatnonzero(continues):
        follows[:, tag] = -np.inf
        follows[[tag - 1, tag], tag] = 0
    total = np.where(continues, -np.inf, scores[0])
    back = np.zeros((words, tags), dtype=int)
    for word in range(1, words):
        ways = total[:, None] + follows
        back[word] = ways.argmax(0)
        total = ways.max(0) + scores[word]
    path = [int(total.argmax())]
    for word in range(words - 1, 0, -1):
        path.append(int(back[word, path[-1]]))
    return path[::-1]


def marked_text(record: Record, text_column: str, label_column: str, where: str) -> tuple[str, list[Any], bool]:
    """Return a record's text in NFC, and its spans; with tokens, also that its words are given.

    Returns:
        The text; with tokens a list of (start, end, written tag), else one of `Marked`; whether there are tokens.

    Raises:
        InputError: a cell is not as it should be.
    """
    if "tokens" in record:
        return *_tagged(record, where), True
    data = record.get("data")
    text = data.get(text_column) if isinstance(data, dict) else record.get(text_column)
    if not isinstance(text, str) or (fault := text_fault(text)):
        raise InputError(f"{where}: {text_column!r} {fault if isinstance(text, str) else 'is no text'}")
    column = span_column(record, label_column)
    composed, length = Composed(text), len(text)
    spans = []
    for start, end, label in _written_spans(record.get(column), f"{where}: {column!r}"):
        if not 0 <= start < end <= length:
            raise InputError(f"{where}: a span from {start} to {end} is not inside the text of {length} characters")
        spans.append((*composed.place(start, end), label))
    spans.sort()
    for one, other in pairwise(spans):
        if other[0] < one[1]:
            raise InputError(f"{where}: spans {one} and {other} overlap; allowed: spans that lie apart")
    return composed.text, spans, False


def span_column(record: Record, label_column: str) -> str:
    """Return the column of a record's spans."""
    return next((column for column in (label_column, *SPAN_COLUMNS) if column in record), "spans")


def _tagged(record: Record, where: str) -> tuple[str, list[Any]]:
    tokens = _listed(record["tokens"], f"{where}: 'tokens'")
    column = next((column for column in TAG_COLUMNS if column in record), "tags")
    tags = _listed(record.get(column), f"{where}: {column!r}")
    if len(tokens) != len(tags) or not all(isinstance(each, str) for each in (*tokens, *tags)):
        raise InputError(f"{where}: {len(tokens)} tokens and {len(tags)} tags; allowed: a tag such as B-PER a token")
    words, text = [], ""
    for token, tag in zip(tokens, tags, strict=True):
        token = Composed(token if not text_fault(token) else "\ufffd").text
        start = len(text) + bool(text)
        text = f"{text} {token}" if text else token
        words.append((start, len(text), tag))
    if not words:
        raise InputError(f"{where}: no tokens")
    return text, words


def tag_spans(tags: Sequence[str], where: str) -> list[tuple[int, int, str]]:
    """Return first word, last word and label of the spans of written tags, in any of the usual schemes."""
    spans: list[tuple[int, int, str]] = []
    open_label = ""
    for place, tag in enumerate(tags):
        letter, dash, label = tag.partition("-")
        if tag in ("O", ""):
            open_label = ""
            continue
        if letter not in "BILUES" or len(letter) != 1 or not dash or not label:
            raise InputError(f"{where}: {tag!r} is no tag; allowed: O, or B-, I-, L-, U-, E-, S- and a label")
        if letter in _BEGIN or label != open_label:
            spans.append((place, place, label))
        else:
            spans[-1] = spans[-1][0], place, label
        open_label = "" if letter in _LAST else label
    return spans


def _listed(cell: Any, where: str) -> list[Any]:
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError:
            raise InputError(f"{where} is no list, nor JSON of one: {cell[:60]!r}") from None
    if not isinstance(cell, list):
        raise InputError(f"{where} is no list: {cell!r}")
    return cell


def _written_spans(cell: Any, where: str) -> Iterator[Marked]:
    """Yield the spans of a cell: ours, or an export's of Doccano, Label Studio or Prodigy."""
    for one in [] if cell in (None, "") else _listed(cell, where):
        if isinstance(one, dict) and "result" in one:  # Label Studio: an annotator's work
            yield from _written_spans([each for each in one["result"] if "labels" in each.get("value", {})], where)
            continue
        if isinstance(one, dict):
            one = one.get("value", one)
            labels = one.get("labels") or [one.get("label")]
            span = [one.get("start", one.get("start_offset")), one.get("end", one.get("end_offset")), labels[0]]
        else:
            span = one if isinstance(one, list) else []
        if len(span) != 3 or type(span[0]) is not int or type(span[1]) is not int or not isinstance(span[2], str):
            raise InputError(f"{where}: {one!r} is no span; allowed: start, end and label")
        yield span[0], span[1], span[2]
