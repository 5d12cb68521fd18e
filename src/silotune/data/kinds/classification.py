"""Rows with one label each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from silotune.data.kinds.base import Kind, Prediction, Reading
from silotune.data.readers import Record, label_names, read_label, read_labels, read_text
from silotune.data.rows import Row
from silotune.data.scores import METRICS, Classified, Counts, roc_areas, scores_of
from silotune.data.tasks import LABEL_METRICS, LOSS_METRICS, Task


class Classification(Kind):
    """One of the task's labels; targets are their indices, shape (rows,), int64."""

    name = "classification"
    rows = "texts with labels"
    answer = "class"
    metrics = (*LABEL_METRICS, *LOSS_METRICS)
    constant = "the most frequent label"
    one_label = True

    @override
    def read(self, task: Task, reading: Reading, number: int, record: Record) -> Row:
        texts = tuple(read_text(reading.path, number, record, column) for column in reading.columns)
        label = read_label(reading.path, number, record, reading.label, reading.truth_values)
        index, remarks = reading.label_index(task, label, reading.row(number))
        return Row(texts, index, remarks=remarks)

    @override
    def label_names(self, reading: Reading, records: Sequence[Record]) -> tuple[str, ...]:
        return label_names(map(str, read_labels(reading.path, records, reading.label)))

    @override
    def known(self, task: Task, value: Any) -> tuple[int, None]:
        index = int(value)
        if task.labels and not 0 <= index < len(task.labels):
            raise ValueError(f"label {value!r}")
        return index, None

    @override
    def text(self, task: Task, row: Row) -> str:
        return task.labels[row.label]

    @override
    def targets(self, task: Task, rows: Sequence[Row]) -> Tensor:
        return torch.tensor([row.label for row in rows], dtype=torch.int64)

    @override
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return nn.functional.cross_entropy(outputs, targets)

    @override
    def scores(self, task: Task, outputs: Tensor, targets: Tensor, drawn: Counts | None = None) -> Mapping[str, Counts]:
        rows = Classified(outputs, targets, task.positive_index)
        if drawn is None:
            return {name: np.array([rows.scores[name]]) for name in rows.scores}
        marks, marked = (np.eye(len(task.labels))[of] for of in rows.arrays)
        return scores_of(drawn @ (marks * marked), drawn @ marks, drawn @ marked, positive=rows.positive)

    @override
    def judge(self, task: Task, metric: str, outputs: Tensor, targets: Tensor) -> float | None:
        if metric not in METRICS:  # one of a kind that extends this one
            return super().judge(task, metric, outputs, targets)
        return METRICS[metric](Classified(outputs, targets, task.positive_index))

    @override
    def constant_outputs(self, task: Task, targets: Tensor) -> Tensor:
        constant = torch.zeros(len(targets), max(2, int(targets.max()) + 1))
        constant[:, int(torch.bincount(targets).argmax())] = 1
        return constant

    @override
    def by_label(self, task: Task, outputs: Tensor, targets: Tensor) -> tuple[Counts, Counts, Counts]:
        return Classified(outputs, targets).counts

    @override
    def written(self, task: Task, outputs: Tensor, targets: Tensor) -> dict[str, list[Any]]:
        return {
            "label": [task.labels[index] for index in targets.tolist()],
            "predicted": [task.labels[index] for index in outputs.argmax(-1).tolist()],
            "probabilities": torch.softmax(outputs.double(), -1).tolist(),
        }

    @override
    def resampled(self, task: Task, metric: str, columns: Mapping[str, Sequence[Any]]) -> Callable[[Counts], Counts]:
        true, answers = (np.array([task.labels.index(name) for name in columns[key]]) for key in ("label", "predicted"))
        if metric == "auroc":
            probabilities = np.array([*map(np.asarray, columns["probabilities"])])
            classes = [1] if len(task.labels) == 2 else sorted({*true.tolist()})
            return lambda drawn: (
                100 * np.mean([roc_areas(drawn, true == of, probabilities[:, of]) for of in classes], 0)
            )
        outputs, targets = torch.eye(len(task.labels))[answers], torch.from_numpy(true)
        return lambda drawn: self.scores(task, outputs, targets, drawn)[metric]

    @override
    def predictions(self, task: Task, outputs: Tensor) -> list[Prediction]:
        by_label = [dict(zip(task.labels, row, strict=True)) for row in torch.softmax(outputs, -1).tolist()]
        return [Prediction(max(row, key=row.__getitem__), row) for row in by_label]

    @override
    def drawn_row(self, task: Task, texts: tuple[str, ...], draw: float) -> Row:
        return Row(texts, int(draw * len(task.labels)))
