"""Rows whose spans are marked: names, drugs, findings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from silotune.data.kinds.base import Kind, Prediction, Reading
from silotune.data.readers import Record, label_names
from silotune.data.rows import Row
from silotune.data.scores import Counts, Scores, ratio
from silotune.data.spans import (
    TAG_COLUMNS,
    Word,
    WordSpan,
    best_tags,
    marked_text,
    span_column,
    spans_of,
    tag_of,
    tag_spans,
    words_of,
)
from silotune.data.tasks import LOSS_METRICS, SPAN_METRICS, Task

NO_WORD = -(2**31)
"""Stands in targets behind a row's last word."""


class Entities(Kind):
    """Spans of the task's labels, as tags of words: none, or the first or a later word of a label's span.

    Outputs lie flat: one line for each word that is read, row after row, shape (words, tags). Targets have the shape
    (rows, most words), int64: a word's tag where it is read, −1 − tag where it is not (cut, or without a token), and
    `NO_WORD` behind the last one. A row's `target` is its words (`spans.Word`).
    """

    name = "entities"
    rows = "texts with marked spans"
    answer = "set of spans"
    metrics = (*SPAN_METRICS, *LOSS_METRICS)
    constant = "nothing"
    baselines = {"outside": "nothing marked", "gazetteer": "gazetteer"}
    least_labels = 1
    by_position = True
    gives = "spans"

    @override
    def outputs(self, task: Task) -> int:
        """Return the number of tags."""
        return 1 + 2 * len(task.labels)

    @override
    def columns(self, reading: Reading, record: Record) -> Sequence[str]:
        if "tokens" in record:
            return ["tokens", next((column for column in TAG_COLUMNS if column in record), "tags")]
        text = "data" if isinstance(record.get("data"), dict) else reading.columns[0]
        return [text, span_column(record, reading.label)]

    @override
    def read(self, task: Task, reading: Reading, number: int, record: Record) -> Row:
        where = reading.row(number)
        remarks: dict[str, None] = {}
        text, words, spans = self._words(reading, number, record)
        tags = [0] * len(words)
        for first, last, label in spans:
            index, remark = reading.label_index(task, label, where)
            remarks |= dict.fromkeys(remark)
            tags[first : last + 1] = [tag_of(index, place == first) for place in range(first, last + 1)]
        target = tuple((*word, tag) for word, tag in zip(words, tags, strict=True))
        return Row((text,), 0, target=target, remarks=tuple(remarks))

    @override
    def label_names(self, reading: Reading, records: Sequence[Record]) -> tuple[str, ...]:
        all_spans = (self._words(reading, number, record)[2] for number, record in enumerate(records, start=1))
        return label_names({label for spans in all_spans for _, _, label in spans})

    def _words(
        self, reading: Reading, number: int, record: Record
    ) -> tuple[str, list[tuple[int, int]], list[tuple[int, int, str]]]:
        """Return a record's text, the places of its words, and its spans: first word, last word, label.

        Words are the record's tokens, or else those of `words_of`; spans are widened to whole words.
        """
        text, marked, tokens = marked_text(record, reading.columns[0], reading.label, reading.row(number))
        if tokens:
            where = reading.row(number)
            return text, [word[:2] for word in marked], tag_spans([tag for _, _, tag in marked], where)
        words = words_of(text)
        spans: list[tuple[int, int, str]] = []
        for start, end, label in marked:
            inside = [place for place, word in enumerate(words) if word[0] < end and word[1] > start]
            inside = inside[1:] if inside and spans and spans[-1][1] == inside[0] else inside
            if inside:
                spans.append((inside[0], inside[-1], label))
        return text, words, spans

    @override
    def known(self, task: Task, value: Any) -> tuple[int, tuple[Word, ...] | None]:
        if value == 0:
            return 0, None
        words = tuple((int(start), int(end), int(tag)) for start, end, tag in value)
        if not all(0 <= tag < self.outputs(task) for _, _, tag in words):
            raise ValueError(f"tags {value!r}")
        return 0, words

    @override
    def label_indices(self, row: Row) -> Sequence[int]:
        return [label for _, _, label in spans_of([tag for *_, tag in words_in(row)])]

    @override
    def text(self, task: Task, row: Row) -> str:
        words = words_in(row)
        spans = spans_of([tag for *_, tag in words])
        pieces = (f"{row.texts[0][words[a][0] : words[b][1]]} [{task.labels[label]}]" for a, b, label in spans)
        return ", ".join(pieces) or "nothing"

    @override
    def targets(self, task: Task, rows: Sequence[Row]) -> Tensor:
        of_rows = [[tag for *_, tag in words_in(row)] for row in rows]
        most = max(map(len, of_rows), default=0)
        tags = [[*own, *[NO_WORD] * (most - len(own))] for own in of_rows]
        return torch.tensor(tags, dtype=torch.int64).reshape(len(rows), most)

    @override
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over rows of each row's mean cross-entropy over its words that are read."""
        mask = targets >= 0
        losses = torch.split(
            nn.functional.cross_entropy(outputs, targets[mask], reduction="none"), mask.sum(1).tolist()
        )
        return torch.stack([own.sum() / max(1, len(own)) for own in losses]).mean()

    @override
    def scores(self, task: Task, outputs: Tensor, targets: Tensor, drawn: Counts | None = None) -> Mapping[str, Counts]:
        return span_scores(span_counts(task, true_spans(targets), predicted_spans(outputs, targets)), drawn)

    @override
    def constant_outputs(self, task: Task, targets: Tensor) -> Tensor:
        return tag_outputs(task, targets.new_zeros(int((targets >= 0).sum())))

    @override
    def by_label(self, task: Task, outputs: Tensor, targets: Tensor) -> tuple[Counts, Counts, Counts]:
        counts = span_counts(task, true_spans(targets), predicted_spans(outputs, targets)).sum(0)
        hits, true, answers = counts[:-2].reshape(3, -1)
        return hits, true, answers

    @override
    def written(self, task: Task, outputs: Tensor, targets: Tensor) -> dict[str, list[Any]]:
        both = {"label": true_spans(targets), "predicted": predicted_spans(outputs, targets)}
        return {
            name: [json.dumps([[a, b, task.labels[label]] for a, b, label in own], ensure_ascii=False) for own in spans]
            for name, spans in both.items()
        }

    @override
    def resampled(self, task: Task, metric: str, columns: Mapping[str, Sequence[Any]]) -> Callable[[Counts], Counts]:
        true, answers = (
            [[(a, b, task.labels.index(label)) for a, b, label in json.loads(text)] for text in columns[name]]
            for name in ("label", "predicted")
        )
        counts = span_counts(task, true, answers)
        return lambda drawn: span_scores(counts, drawn)[metric]

    @override
    def predictions(self, task: Task, outputs: Tensor) -> list[Prediction]:
        raise TypeError("spans are marked in a text: `PersonalModel.predict`")

    @override
    def drawn_row(self, task: Task, texts: tuple[str, ...], draw: float) -> Row:
        tags = [tag_of(int(draw * len(task.labels)), True)]
        words = words_of(texts[0])
        return Row(texts[:1], 0, target=tuple((*word, tag) for word, tag in zip(words, tags + [0] * len(words))))  # noqa: B905

    @override
    def own_baselines(self, task: Task, train: Sequence[Row], test: Sequence[Row]) -> Scores:
        """Score marking nothing, and a gazetteer: the training rows' spans, marked wherever they stand."""
        targets = self.targets(task, test)
        tags = [tag for own in gazetteer_tags(train, test) for tag in own]
        outputs = {"outside": self.constant_outputs(task, targets), "gazetteer": tag_outputs(task, torch.tensor(tags))}
        return {name: self.judge(task, task.metric, own, targets) for name, own in outputs.items()}


def words_in(row: Row) -> tuple[Word, ...]:
    """Return a row's words with their tags; those of a text that is to be marked have none."""
    if isinstance(row.target, tuple):
        return row.target
    return tuple((start, end, 0) for start, end in words_of(row.texts[0]))


def tag_outputs(task: Task, tags: Tensor) -> Tensor:
    """Return outputs that say these tags, shape (words, tags)."""
    return nn.functional.one_hot(tags.long(), task.outputs).float()


def gazetteer_tags(train: Sequence[Row], test: Sequence[Row]) -> list[list[int]]:
    """Return the tags of test words where the longest training span that stands there is marked."""
    gazetteer: dict[tuple[str, ...], Counter[int]] = {}
    for row in train:
        words = words_in(row)
        for first, last, label in spans_of([tag for *_, tag in words]):
            name = tuple(row.texts[0][start:end] for start, end, _ in words[first : last + 1])
            gazetteer.setdefault(name, Counter())[label] += 1
    longest = max(map(len, gazetteer), default=0)
    tags = []
    for row in test:
        texts = [row.texts[0][start:end] for start, end, _ in words_in(row)]
        own, place = [0] * len(texts), 0
        while place < len(texts):
            lengths = range(min(longest, len(texts) - place), 0, -1)
            length = next((n for n in lengths if tuple(texts[place : place + n]) in gazetteer), 0)
            if length:
                label = gazetteer[tuple(texts[place : place + length])].most_common(1)[0][0]
                own[place : place + length] = [tag_of(label, step == 0) for step in range(length)]
            place += length or 1
        tags.append(own)
    return tags


def true_spans(targets: Tensor) -> list[list[WordSpan]]:
    """Return the spans of each row's targets, also of words that are not read."""
    rows = ([tag if tag >= 0 else -1 - tag for tag in row if tag != NO_WORD] for row in targets.tolist())
    return [spans_of(tags) for tags in rows]


def predicted_spans(outputs: Tensor, targets: Tensor) -> list[list[WordSpan]]:
    """Return the likeliest valid spans of each row; words that are not read have none."""
    mask = targets >= 0
    spans = []
    for own, places in zip(torch.split(outputs.double(), mask.sum(1).tolist()), mask, strict=True):
        words = places.nonzero().flatten().tolist()
        spans.append([(words[a], words[b], label) for a, b, label in spans_of(best_tags(own.numpy()))])
    return spans


def span_counts(task: Task, true: Sequence[Sequence[WordSpan]], answers: Sequence[Sequence[WordSpan]]) -> Counts:
    """Count each row's spans, shape (rows, 3 · labels + 2).

    For each label predicted spans that are true ones, true ones, and predicted ones; then spans whose place is right,
    whatever their label, plus half of those that overlap a true span which no other one does (MUC-5, the partial
    score); then true spans of which every word is marked.
    """
    labels = len(task.labels)
    counts = np.zeros((len(true), 3 * labels + 2))
    for row, truth, answer in zip(counts, true, answers, strict=True):
        for place, spans in enumerate(({*truth} & {*answer}, truth, answer)):
            for _, _, label in spans:
                row[place * labels + label] += 1
        places = {span[:2] for span in truth} & {span[:2] for span in answer}
        rest = [span for span in truth if span[:2] not in places]
        row[-2] = len(places)
        for first, last, _ in (span for span in answer if span[:2] not in places):
            overlapped = next((span for span in rest if span[0] <= last and span[1] >= first), None)
            if overlapped is not None:
                rest.remove(overlapped)
                row[-2] += 0.5
        marked = {word for first, last, _ in answer for word in range(first, last + 1)}
        row[-1] = sum({*range(first, last + 1)} <= marked for first, last, _ in truth)
    return counts


def span_scores(counts: Counts, drawn: Counts | None = None) -> dict[str, Counts]:
    """Score counts of rows, in percent; NaN without true spans.

    Returns:
        metric → scores, shape (resamples,): `span_f1`, F1 of spans whose place and label are right, of all labels
        together; `partial_f1`, where an overlap counts half and labels do not count; `span_recall`, the share of true
        spans of which every word is marked, whatever the label.
    """
    total = counts.sum(0, keepdims=True) if drawn is None else drawn @ counts
    hits, true, answers = (part.sum(1) for part in np.split(total[:, :-2], 3, axis=1))
    scores = {
        "span_f1": ratio(2 * hits, true + answers),
        "partial_f1": ratio(2 * total[:, -2], true + answers),
        "span_recall": ratio(total[:, -1], true),
    }
    return {name: np.where(true > 0, 100 * values, np.nan) for name, values in scores.items()}
