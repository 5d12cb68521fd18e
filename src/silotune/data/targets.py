"""Read the rows of a task from the records of a file, as the task's kind says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from silotune.data.kinds import Reading
from silotune.data.kinds.entities import NO_WORD
from silotune.data.readers import Record, are_all_truth_values, require_columns
from silotune.data.rows import UNREAD, Row
from silotune.data.tasks import Task
from silotune.errors import InputError


def target_rows(
    path: Path,
    records: Sequence[Record],
    text_columns: Sequence[str],
    label_column: str,
    task: Task,
    *,
    by_index: bool,
    separator: str | None = None,
    declared: bool = False,
    noised: bool = False,
) -> list[Row]:
    """Make rows of a task whose rows have labels, numbers or spans; arguments as for `Reading`.

    With noise on rows (`noised`) a row that is not as it should be is `UNREAD` and refuses no file, and none has a say
    in how another one is read.
    """
    reading = Reading(path, text_columns, label_column, by_index, separator, declared)
    require_columns(path, records[0], task.rules.columns(reading, records[0]))
    truth_values = noised or are_all_truth_values(records, label_column)
    reading = Reading(path, text_columns, label_column, by_index, separator, declared, truth_values)
    rows = []
    for number, record in enumerate(records, start=1):
        try:
            rows.append(task.rules.read(task, reading, number, record))
        except InputError as error:
            if not noised:
                raise
            rows.append(Row(("",) * len(text_columns), UNREAD, remarks=(f"counts as empty: {error}",)))
    return rows


def target_tensor(task: Task, rows: Sequence[Row]) -> Tensor:
    """Return the rows' targets as a tensor, which losses and metrics compare outputs with (`Kind.targets`)."""
    targets: Tensor = task.rules.targets(task, rows)
    return targets


def joined_targets(first: Tensor, second: Tensor) -> Tensor:
    """Return the targets of rows of one task behind one another, of words as wide as the widest row."""
    if first.ndim == 2 and first.shape[1] != second.shape[1]:
        width = max(first.shape[1], second.shape[1])
        first, second = (nn.functional.pad(own, (0, width - own.shape[1]), value=NO_WORD) for own in (first, second))
    return torch.cat([first, second])
