"""Rows with a number each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from silotune.data.kinds.base import Kind, Prediction, Reading
from silotune.data.readers import Record, read_text
from silotune.data.rows import Row
from silotune.data.scores import Counts, number_scores
from silotune.data.tasks import LOSS_METRICS, NUMBER_METRICS, Task
from silotune.errors import InputError


class Regression(Kind):
    """A number; targets have the shape (rows,), float32."""

    name = "regression"
    rows = "texts with numbers"
    answer = "number"
    metrics = (*NUMBER_METRICS, *LOSS_METRICS)
    constant = "the mean number"
    baselines = {"mean": "mean number"}
    least_labels = 0

    @override
    def outputs(self, task: Task) -> int:
        """Return 1: the number itself."""
        return 1

    @override
    def read(self, task: Task, reading: Reading, number: int, record: Record) -> Row:
        texts = tuple(read_text(reading.path, number, record, column) for column in reading.columns)
        return Row(texts, 0, target=read_number(record.get(reading.label), reading.cell(number)))

    @override
    def known(self, task: Task, value: Any) -> tuple[int, float]:
        return 0, float(value)

    @override
    def label_indices(self, row: Row) -> Sequence[int]:
        return ()

    @override
    def text(self, task: Task, row: Row) -> str:
        return f"{number_of(row):.9g}"

    @override
    def targets(self, task: Task, rows: Sequence[Row]) -> Tensor:
        return torch.tensor([number_of(row) for row in rows], dtype=torch.float32)

    @override
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error."""
        return nn.functional.mse_loss(outputs[:, 0], targets.to(outputs.dtype))

    @override
    def scores(self, task: Task, outputs: Tensor, targets: Tensor, drawn: Counts | None = None) -> Mapping[str, Counts]:
        return number_scores(outputs[:, 0].double().numpy(), targets.double().numpy(), drawn)

    @override
    def constant_outputs(self, task: Task, targets: Tensor) -> Tensor:
        return targets.mean().expand(len(targets), 1)

    @override
    def written(self, task: Task, outputs: Tensor, targets: Tensor) -> dict[str, list[Any]]:
        both = {"label": targets, "predicted": outputs[:, 0]}
        return {name: [f"{value:.9g}" for value in values.tolist()] for name, values in both.items()}

    @override
    def resampled(self, task: Task, metric: str, columns: Mapping[str, Sequence[Any]]) -> Callable[[Counts], Counts]:
        guess, true = (torch.tensor([*map(float, columns[key])], dtype=torch.float64) for key in ("predicted", "label"))
        return lambda drawn: self.scores(task, guess[:, None], true, drawn)[metric]

    @override
    def predictions(self, task: Task, outputs: Tensor) -> list[Prediction]:
        return [Prediction("", value=value) for value in outputs[:, 0].tolist()]

    @override
    def drawn_row(self, task: Task, texts: tuple[str, ...], draw: float) -> Row:
        return Row(texts, 0, target=draw)


def read_number(cell: object, where: str) -> float:
    """Return a cell as a number."""
    value = math.nan
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        value = float(cell)
    elif isinstance(cell, str):
        with suppress(ValueError):
            value = float(cell)
    if not math.isfinite(value):
        raise InputError(f"{where} is no number: {cell!r}; kind=regression needs a finite number in every row")
    return value


def number_of(row: Row) -> float:
    """Return the number of a regression's row; 0 for a row that is to be predicted."""
    return row.target if isinstance(row.target, float) else 0.0
