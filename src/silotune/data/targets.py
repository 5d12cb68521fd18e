"""Read the targets of rows from their label column: a label, a number, or a set of labels.

A label is one of the task's classes, a number belongs to a regression, and a label set to rows with several labels.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from silotune.config.tables import source_name
from silotune.data.readers import Record, are_all_truth_values, label_names, read_label, read_text, require_columns
from silotune.data.rows import UNREAD, Row
from silotune.data.tasks import Task, label_spelling
from silotune.errors import InputError

SEPARATOR = ","
"""Between the labels of one cell, where `label_separator` names no other."""


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
    """Make rows of a task whose rows have labels, numbers or sets of labels.

    With `by_index` a whole-number label is an index into the task's labels (data sets with a `meta.json`); with
    `declared` the configuration names the labels, and a row's may be spelled otherwise. The separator is of cells with
    several labels. With noise on rows (`noised`) a row that is not as it should be is `UNREAD` and refuses no file, and
    none has a say in how another one is read.
    """
    require_columns(path, records[0], [*text_columns, label_column])
    truth_values = noised or are_all_truth_values(records, label_column)

    def read(number: int, record: Record) -> Row:
        texts = tuple(read_text(path, number, record, column) for column in text_columns)
        where = f"{source_name(path)}: row {number}: {label_column!r}"
        cell = record.get(label_column)
        if task.kind == "classification":
            label = read_label(path, number, record, label_column, truth_values)
            index, remark = _label_index(task, label, by_index, declared, f"{source_name(path)}: row {number}")
            return Row(texts, index, remarks=remark)
        if task.kind == "regression":
            return Row(texts, 0, target=read_number(cell, where))
        indices: set[int] = set()
        remarks: dict[str, None] = {}
        for label in read_label_set(cell, where, separator):
            index, remark = _label_index(task, label, by_index, declared, where)
            indices.add(index)
            remarks |= dict.fromkeys(remark)
        return Row(texts, 0, target=tuple(sorted(indices)), remarks=tuple(remarks))

    rows = []
    for number, record in enumerate(records, start=1):
        try:
            rows.append(read(number, record))
        except InputError as error:
            if not noised:
                raise
            rows.append(Row(("",) * len(text_columns), UNREAD, remarks=(f"counts as empty: {error}",)))
    return rows


def _label_index(
    task: Task, label: str | int, by_index: bool, declared: bool, where: str
) -> tuple[int, tuple[str, ...]]:
    """Return the index of a row's label, and a remark if the task's label is written otherwise."""
    if by_index and isinstance(label, int):
        index, written = label, ""
    else:
        written = str(label)
        index = task.label_index(written)
        if index < 0 and declared:
            alike = [name for name in task.labels if label_spelling(name) == label_spelling(written)]
            index = task.label_index(alike[0]) if len(alike) == 1 else -1
    if not 0 <= index < len(task.labels):
        raise InputError(f"{where}: unknown label {label!r}; allowed: {', '.join(task.labels)}")
    name = task.labels[index]
    if written in ("", name):
        return index, ()
    shown = ascii if unicodedata.normalize("NFC", written) == unicodedata.normalize("NFC", name) else repr
    return index, (f"the label {shown(written)} is read as {shown(name)}",)


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


def label_set_names(path: Path, records: Sequence[Record], column: str, separator: str | None) -> tuple[str, ...]:
    """Return the distinct labels of rows with several, in the order of `label_names`."""
    require_columns(path, records[0], [column])
    found: Iterable[str | int] = (
        label
        for number, record in enumerate(records, start=1)
        for label in read_label_set(record.get(column), f"{source_name(path)}: row {number}: {column!r}", separator)
    )
    return label_names(found)


def target_tensor(task: Task, rows: Sequence[Row]) -> Tensor:
    """Return the rows' targets as a tensor, which losses and metrics compare outputs with.

    Returns:
        Class indices, shape (rows,), int64; for a regression the rows' numbers, shape (rows,), float32; for rows with
        several labels 1 where a row has a label, else 0, shape (rows, labels), float32.
    """
    if task.kind == "regression":
        return torch.tensor([number_of(row) for row in rows], dtype=torch.float32)
    if task.kind == "multilabel":
        marks = torch.zeros(len(rows), len(task.labels))
        for place, row in enumerate(rows):
            marks[place, list(label_set_of(row))] = 1
        return marks
    return torch.tensor([row.label for row in rows], dtype=torch.int64)


def number_of(row: Row) -> float:
    """Return the number of a regression's row; 0 for a row that is to be predicted."""
    return row.target if isinstance(row.target, float) else 0.0


def label_set_of(row: Row) -> tuple[int, ...]:
    """Return the indices of a row's labels, where it may have several; none for a row that is to be predicted."""
    return row.target if isinstance(row.target, tuple) else ()
