"""Rows with any number of labels each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from silotune.data.kinds.base import Kind, Prediction, Reading
from silotune.data.readers import Record, label_names, read_text
from silotune.data.rows import Row
from silotune.data.scores import Counts, label_set_scores
from silotune.data.tasks import LABEL_SET_METRICS, LOSS_METRICS, Task
from silotune.errors import InputError

SEPARATOR = ","
"""Between the labels of one cell, where `label_separator` names no other."""


class Multilabel(Kind):
    """A set of labels; targets are 1 where a row has a label, else 0, shape (rows, labels), float32."""

    name = "multilabel"
    rows = "texts with several labels"
    answer = "set of labels"
    metrics = (*LABEL_SET_METRICS, *LOSS_METRICS)
    constant = "the labels of most rows"

    @override
    def read(self, task: Task, reading: Reading, number: int, record: Record) -> Row:
        texts = tuple(read_text(reading.path, number, record, column) for column in reading.columns)
        where = reading.cell(number)
        indices: set[int] = set()
        remarks: dict[str, None] = {}
        for label in read_label_set(record.get(reading.label), where, reading.separator):
            index, remark = reading.label_index(task, label, where)
            indices.add(index)
            remarks |= dict.fromkeys(remark)
        return Row(texts, 0, target=tuple(sorted(indices)), remarks=tuple(remarks))

    @override
    def label_names(self, reading: Reading, records: Sequence[Record]) -> tuple[str, ...]:
        names: Iterable[str | int] = (
            label
            for number, record in enumerate(records, start=1)
            for label in read_label_set(record.get(reading.label), reading.cell(number), reading.separator)
        )
        return label_names(names)

    @override
    def known(self, task: Task, value: Any) -> tuple[int, tuple[int, ...]]:
        indices = tuple(map(int, value))
        if task.labels and not {*indices} <= {*range(len(task.labels))}:
            raise ValueError(f"label {value!r}")
        return 0, indices

    @override
    def label_indices(self, row: Row) -> Sequence[int]:
        return label_set_of(row)

    @override
    def text(self, task: Task, row: Row) -> str:
        return ", ".join(task.labels[index] for index in label_set_of(row)) or "no label"

    @override
    def targets(self, task: Task, rows: Sequence[Row]) -> Tensor:
        marks = torch.zeros(len(rows), len(task.labels))
        for place, row in enumerate(rows):
            marks[place, list(label_set_of(row))] = 1
        return marks

    @override
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the binary cross-entropy, as a mean over rows and labels."""
        return nn.functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))

    @override
    def scores(self, task: Task, outputs: Tensor, targets: Tensor, drawn: Counts | None = None) -> Mapping[str, Counts]:
        return label_set_scores(outputs.double().numpy(), targets.numpy(), drawn)

    @override
    def constant_outputs(self, task: Task, targets: Tensor) -> Tensor:
        return (targets.mean(0) - 0.5).expand(len(targets), -1)

    @override
    def by_label(self, task: Task, outputs: Tensor, targets: Tensor) -> tuple[Counts, Counts, Counts]:
        answers, true = (marks.numpy() for marks in (outputs > 0, targets > 0))
        return (answers & true).sum(0), true.sum(0), answers.sum(0)

    @override
    def written(self, task: Task, outputs: Tensor, targets: Tensor) -> dict[str, list[Any]]:
        def lists(marks: Tensor) -> list[str]:
            named = ([name for name, mark in zip(task.labels, row, strict=True) if mark > 0] for row in marks.tolist())
            return [json.dumps(names, ensure_ascii=False) for names in named]

        probabilities = torch.sigmoid(outputs.double()).tolist()
        return {"label": lists(targets), "predicted": lists(outputs), "probabilities": probabilities}

    @override
    def resampled(self, task: Task, metric: str, columns: Mapping[str, Sequence[Any]]) -> Callable[[Counts], Counts]:
        probabilities = np.array([*map(np.asarray, columns["probabilities"])])
        true = np.array([[name in json.loads(names) for name in task.labels] for names in columns["label"]], float)
        return lambda drawn: label_set_scores(probabilities - 0.5, true, drawn)[metric]

    @override
    def predictions(self, task: Task, outputs: Tensor) -> list[Prediction]:
        by_label = [dict(zip(task.labels, row, strict=True)) for row in torch.sigmoid(outputs).tolist()]
        return [Prediction("", row, labels=tuple(label for label in row if row[label] > 0.5)) for row in by_label]

    @override
    def drawn_row(self, task: Task, texts: tuple[str, ...], draw: float) -> Row:
        return Row(texts, 0, target=(int(draw * len(task.labels)),))


def read_label_set(cell: object, where: str, separator: str | None = None) -> list[str | int]:
    """Return the labels of a cell: a list of texts or whole numbers, or a text with separators; empty: none."""
    if isinstance(cell, str):
        return [label for part in cell.split(separator or SEPARATOR) if (label := part.strip())]
    if not isinstance(cell, list) or not all(type(label) in (str, int) and label != "" for label in cell):
        raise InputError(
            f"{where} holds no labels: {cell!r}; allowed: a list of texts or whole numbers, or a text with "
            f"{separator or SEPARATOR!r} between labels (label_separator)"
        )
    return [label.strip() if isinstance(label, str) else label for label in cell]


def label_set_of(row: Row) -> tuple[int, ...]:
    """Return the indices of a row's labels, where it may have several; none for a row that is to be predicted."""
    return row.target if isinstance(row.target, tuple) else ()
