"""Rows whose answer is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from silotune.data.kinds.base import Kind
from silotune.data.rows import Row
from silotune.data.scores import Counts, exact_matches, rouge_scores
from silotune.data.tasks import LOSS_METRICS, TEXT_METRICS, Task


class Generation(Kind):
    """A text, which `models/forward/generation.py` writes; rows are read by `data/generation_rows.py`."""

    name = "generation"
    rows = "instructions with outputs"
    answer = "text"
    metrics = (*TEXT_METRICS, *LOSS_METRICS)
    labeled = False
    gives = "answers"
    least_labels = 0

    @override
    def known(self, task: Task, value: Any) -> tuple[int, None]:
        return int(value), None

    @override
    def label_indices(self, row: Row) -> Sequence[int]:
        return ()

    @override
    def text(self, task: Task, row: Row) -> str:
        return row.answer

    @override
    def targets(self, task: Task, rows: Sequence[Row]) -> Tensor:
        return torch.tensor([row.label for row in rows], dtype=torch.int64)

    @override
    def resampled(self, task: Task, metric: str, columns: Mapping[str, Sequence[Any]]) -> Callable[[Counts], Counts]:
        predicted, label = columns["predicted"], columns["label"]
        rouge = metric in ("rouge1", "rougeL")
        values = np.array(rouge_scores(metric, predicted, label) if rouge else exact_matches(predicted, label))
        return lambda drawn: 100 * (drawn @ values) / drawn.sum(1)

    @override
    def drawn_row(self, task: Task, texts: tuple[str, ...], draw: float) -> Row:
        return Row((texts[0], ""), 0, texts[1])

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("written answers have no outputs that are compared with targets")

    read = scores = constant_outputs = written = _refuse
