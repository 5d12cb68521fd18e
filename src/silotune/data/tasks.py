"""`Task`, `Row`, `Splits`, `LabeledSet`, `SiloData`: data before tokenization; makes tasks; `check_silo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from silotune.data.metrics import LOSS_METRICS, METRICS, TEXT_METRICS
from silotune.errors import InputError, unknown_name_error

TaskKind = Literal["classification", "generation"]

Turn = tuple[str, str]
"""A turn of a conversation: its role (system, user or assistant) and its content."""

ASSISTANT = "assistant"


@dataclass(frozen=True)
class Task:
    """Meaning of a row's label or answer.

    Args:
        name: silos with the same task name share label names and may share a head.
        labels: label names; empty for generation.
        metric: key of `METRICS`, or of `TEXT_METRICS` for generation; or of `LOSS_METRICS`.
        kind: classification or generation.
        positive: the label that F1 is about; empty if none is.
    """

    name: str
    labels: tuple[str, ...]
    metric: str = "accuracy"
    kind: TaskKind = "classification"
    positive: str = ""

    @property
    def positive_index(self) -> int:
        """The index of the label that F1 is about; −1 if none is."""
        return self.labels.index(self.positive) if self.positive else -1

    def fields(self) -> dict[str, Any]:
        """Return the task as JSON values, which `read_task` reads."""
        fields = {"name": self.name, "labels": list(self.labels), "metric": self.metric, "kind": self.kind}
        return fields | ({"positive": self.positive} if self.positive else {})


def _metrics(kind: TaskKind) -> list[str]:
    """Return the metrics of a kind of task."""
    return [*(METRICS if kind == "classification" else TEXT_METRICS), *LOSS_METRICS]


def make_task(name: str, labels: Sequence[str], metric: str, culprit: str, positive: str | None = None) -> Task:
    """Make a classification task.

    Args:
        name: the task's name.
        labels: label names.
        metric: key of `METRICS` or `LOSS_METRICS`; `f1` without a positive label becomes `macro_f1`.
        culprit: configuration key or file to name in errors.
        positive: the label that F1 is about.

    Raises:
        InputError: the metric is unknown, or there is no such label.
    """
    if metric not in _metrics("classification"):
        raise unknown_name_error(f"metric of {culprit}", metric, _metrics("classification"))
    if positive is not None and positive not in labels:
        raise unknown_name_error(f"positive label of {culprit}", positive, labels)
    if metric == "f1" and positive is None:
        metric = "macro_f1"
    return Task(name, tuple(labels), metric, positive=positive or "")


def numbered_positive(labels: Sequence[str]) -> str | None:
    """Return the positive one of two labels that a data set numbers 0 and 1, as GLUE does: label 1."""
    return labels[1] if len(labels) == 2 else None


def generation_task(name: str, metric: str, culprit: str) -> Task:
    """Make a generation task.

    Args:
        name: the task's name.
        metric: key of `TEXT_METRICS` or `LOSS_METRICS`.
        culprit: configuration key or file to name in errors.

    Raises:
        InputError: the metric is unknown.
    """
    if metric not in _metrics("generation"):
        raise unknown_name_error(f"metric of {culprit}", metric, _metrics("generation"))
    return Task(name, (), metric, "generation")


@dataclass(frozen=True)
class Row:
    """One labeled text, text pair, instruction or conversation.

    Args:
        texts: one text or two; for generation the instruction and its input (may be empty).
        label: index into the task's label names; 0 for generation.
        answer: reference text for generation.
        group: value of the column that defines natural silos, if there is one.
        turns: the conversation before the answer, which is then the assistant's next turn; empty for other rows.
            `texts` holds its last turn.
        rejected: the answer that `answer` is preferred to (preference pairs).
    """

    texts: tuple[str, ...]
    label: int
    answer: str = ""
    group: str = ""
    turns: tuple[Turn, ...] = ()
    rejected: str = ""


@dataclass
class Splits:
    """Rows of one data set by split."""

    train: list[Row] = field(default_factory=list)
    validation: list[Row] = field(default_factory=list)
    test: list[Row] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Number of rows per split."""
        return {"train": len(self.train), "validation": len(self.validation), "test": len(self.test)}


@dataclass(frozen=True)
class LabeledSet:
    """A task and its published splits.

    Args:
        task: the task.
        splits: its rows.
        unsplit: whether all rows come from one file (in `splits.train`) that is still to be split.
    """

    task: Task
    splits: Splits
    unsplit: bool = False


@dataclass
class SiloData:
    """A silo's name and its rows, all of one task."""

    name: str
    task: Task
    splits: Splits


def check_silo(data: SiloData) -> SiloData:
    """Check that a silo's data can be learned from, and return it.

    Raises:
        InputError: there are no training rows, no test rows, or only one class.
    """
    rows = data.splits
    if not rows.train:
        raise InputError(f"silo {data.name!r}: no training rows")
    classes = {row.label for row in rows.train}
    if len(classes) < 2 and data.task.kind == "classification":
        only = data.task.labels[next(iter(classes))]
        raise InputError(f"silo {data.name!r}: only one class in its training rows ({only!r}); at least 2 are needed")
    if not rows.test:
        raise InputError(f"silo {data.name!r}: no test rows")
    return data


def read_task(fields: Any) -> Task:
    """Parse a task from JSON values, as `Task.fields` writes them.

    Older versions wrote no positive label: F1 was of label 1 then.

    Raises:
        ValueError: the value does not describe a task.
    """
    if not isinstance(fields, dict) or fields.keys() - {"positive"} != {"name", "labels", "metric", "kind"}:
        raise ValueError("not a task")
    labels = fields["labels"]
    texts = [fields["name"], fields["metric"], *labels] if isinstance(labels, list | tuple) else [None]
    if not all(isinstance(text, str) for text in texts) or fields["kind"] not in ("classification", "generation"):
        raise ValueError("not a task")
    if fields["metric"] not in _metrics(fields["kind"]):
        raise ValueError("not a task's metric")
    positive = fields.get("positive", (numbered_positive(labels) or "") if fields["metric"] == "f1" else "")
    if positive not in ("", *labels) or (fields["metric"] == "f1" and not positive):
        raise ValueError("not a task's positive label")
    return Task(fields["name"], tuple(labels), fields["metric"], fields["kind"], positive)
