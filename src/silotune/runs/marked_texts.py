"""Mark spans in texts of any length with one silo's model; places are those of the text as it was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silotune.data.composed import Composed
from silotune.data.entity_tokenizer import first_tokens
from silotune.data.kinds import Prediction, Span
from silotune.data.rows import Row
from silotune.data.spans import best_tags, spans_of, words_of
from silotune.data.tasks import Task
from silotune.training.prediction import PredictionContext


@dataclass(frozen=True)
class _Window:
    """Some words of a text, from `first` to before `last`, that the model reads together."""

    text: int
    first: int
    last: int


class MarkedTexts:
    """Texts that are to be marked: as rows for the model, and its outputs as their spans.

    A text that does not fit (`train.max_length`) is read in windows that overlap by half; a word's tag is that of the
    window with most text around it. `rows` are the windows of all texts.
    """

    def __init__(self, context: PredictionContext, task: Task, texts: Sequence[str]) -> None:
        self._task, self._texts = task, texts
        self._composed = [Composed(text) for text in texts]
        self._words = [words_of(each.text) for each in self._composed]
        windows = _windows(context, self._composed, self._words)
        self._windows = [_Window(number, *window) for number, own in enumerate(windows) for window in own]
        tokenize = context.head.row_tokenizer(context.backbone, context.max_length)
        self.rows = tokenize(task, [self._row(window) for window in self._windows])

    def predictions(self, outputs: Tensor) -> list[Prediction]:
        """Return the spans of each text by the outputs for `rows`, flat, shape (words, tags)."""
        scores = [np.full((len(own), self._task.outputs), np.nan) for own in self._words]
        around = [np.full(len(own), -1) for own in self._words]
        read = self.rows.labels >= 0
        found = torch.split(torch.log_softmax(outputs.double(), -1), read.sum(1).tolist()) if len(read) else ()
        for window, own, of_window in zip(self._windows, found, read, strict=True):
            places = of_window.nonzero().flatten().numpy()
            room = np.minimum(places, window.last - window.first - 1 - places)
            better = room > around[window.text][window.first + places]
            chosen = window.first + places[better]
            around[window.text][chosen], scores[window.text][chosen] = room[better], own.numpy()[better]
        texts = zip(self._texts, self._composed, self._words, scores, strict=True)
        return [_prediction(self._task, *each) for each in texts]

    def _row(self, window: _Window) -> Row:
        words = self._words[window.text][window.first : window.last]
        start, text = words[0][0], self._composed[window.text].text
        return Row((text[start : words[-1][1]],), 0, target=tuple((a - start, b - start, 0) for a, b in words))


def _prediction(task: Task, written: str, composed: Composed, words: list[tuple[int, int]], scores: Any) -> Prediction:
    read = np.flatnonzero(~np.isnan(scores).any(1))
    tags = best_tags(scores[read])
    likely = np.exp(scores[read, tags])
    spans = []
    for a, b, label in spans_of(tags):
        start, end = composed.origin(words[read[a]][0], words[read[b]][1])
        spans.append(Span(start, end, task.labels[label], written[start:end], float(likely[a : b + 1].mean())))
    return Prediction("", spans=tuple(spans))


def _windows(
    context: PredictionContext, texts: Sequence[Composed], words: Sequence[list[tuple[int, int]]]
) -> list[list[tuple[int, int]]]:
    """Return for each text its windows: first word, and the one behind the last."""
    if not texts:
        return []
    tokenizer: Any = context.backbone.tokenizer
    room = max(1, context.max_length - tokenizer.num_special_tokens_to_add())
    encoded = tokenizer([each.text for each in texts], add_special_tokens=False, return_offsets_mapping=True)
    windows = []
    for own, offsets in zip(words, encoded["offset_mapping"], strict=True):
        if len(offsets) <= room:
            windows.append([(0, len(own))] if own else [])
            continue
        starts = [-1 if place is None else place for place in first_tokens(own, offsets)]
        windows.append(_cut(np.maximum.accumulate([*starts, len(offsets)]).tolist(), room))
    return windows


def _cut(starts: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Cut words into overlapping windows of at most `room` tokens; `starts` is each one's first token, and the end."""
    windows, first, words = [], 0, len(starts) - 1
    while first < words:
        last = first + 1
        while last < words and starts[last + 1] - starts[first] <= room:
            last += 1
        windows.append((first, last))
        if last == words:
            break
        first = max(first + 1, first + (last - first) // 2)
    return windows
