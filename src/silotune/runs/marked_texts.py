"""Mark spans in texts of any length with one silo's model; places are those of the text as it was written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from silotune.data.composed import Composed
from silotune.data.kinds import Prediction, Span
from silotune.data.long_texts import LongTexts
from silotune.data.rows import Row
from silotune.data.spans import best_tags, spans_of, words_of
from silotune.data.tasks import Task
from silotune.models.heads import Head
from silotune.training.prediction import PredictionContext


def marking_head(context: PredictionContext) -> Head:
    """Return a model's head as it marks texts: longer ones in windows, which overlap by half where rows were cut."""
    head, room = context.head, context.max_length - context.backbone.tokenizer.num_special_tokens_to_add()
    return head.with_long_texts(LongTexts("windows", room // 2)) if head.long_texts.reads == "cut" else head


class MarkedTexts:
    """Texts that are to be marked: as rows for the model, and its outputs as their spans."""

    def __init__(self, context: PredictionContext, task: Task, texts: Sequence[str]) -> None:
        self._task, self._texts = task, texts
        self._composed = [Composed(text) for text in texts]
        self._words = [words_of(each.text) for each in self._composed]
        tokenize = marking_head(context).row_tokenizer(context.backbone, context.max_length)
        self.rows = tokenize(task, [Row((each.text,), 0) for each in self._composed])

    def predictions(self, outputs: Tensor) -> list[Prediction]:
        """Return the spans of each text by the outputs for `rows`, flat, shape (words, tags)."""
        mask = self.rows.labels >= 0
        scores = torch.split(torch.log_softmax(outputs.double(), -1), mask.sum(1).tolist()) if len(mask) else ()
        places = [own.nonzero().flatten().tolist() for own in mask]
        texts = zip(self._texts, self._composed, self._words, places, scores, strict=True)
        return [_prediction(self._task, *each) for each in texts]


def _prediction(
    task: Task, written: str, composed: Composed, words: list[tuple[int, int]], places: list[int], scores: Tensor
) -> Prediction:
    """Return the spans of a text by the log-probabilities of the tags of the words that are read."""
    tags = best_tags(scores.numpy())
    likely = scores.exp().numpy()[range(len(places)), tags]
    spans = []
    for a, b, label in spans_of(tags):
        start, end = composed.origin(words[places[a]][0], words[places[b]][1])
        spans.append(Span(start, end, task.labels[label], written[start:end], float(likely[a : b + 1].mean())))
    return Prediction("", spans=tuple(spans))
