"""Tasks, rows and silos' data: what is known of a silo's text before it is tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from silotune.data.metrics import METRICS, TEXT_METRICS
from silotune.errors import InputError, unknown

TaskKind = Literal["classification", "generation"]


@dataclass(frozen=True)
class Task:
    """What a row means. Silos of one task share label names (and may share a head). A generation task has no labels."""

    name: str
    labels: tuple[str, ...]
    metric: str = "accuracy"
    kind: TaskKind = "classification"


def make_task(name: str, labels: Sequence[str], metric: str, culprit: str) -> Task:
    """A task, checked; `culprit` says who asks for it.

    Raises:
        InputError: for an unknown metric, or F1 over other than two classes.
    """
    if metric not in METRICS:
        raise unknown(f"metric of {culprit}", metric, METRICS)
    if metric == "f1" and len(labels) != 2:
        raise InputError(f"{culprit}: metric f1 needs 2 labels, found {', '.join(labels)}; allowed: accuracy")
    return Task(name, tuple(labels), metric)


def generation_task(name: str, metric: str, culprit: str) -> Task:
    """A task whose answers are written; `culprit` says who asks for it.

    Raises:
        InputError: for an unknown metric.
    """
    if metric not in TEXT_METRICS:
        raise unknown(f"metric of {culprit}", metric, TEXT_METRICS)
    return Task(name, (), metric, "generation")


@dataclass(frozen=True)
class Row:
    """One labeled text, or pair of texts; `label` indexes the task's label names.

    In a generation task `texts` are instruction and input (which may be empty), and `answer` is what to write. `group`
    is the value of the column that makes natural silos, where one does.
    """

    texts: tuple[str, ...]
    label: int
    answer: str = ""
    group: str = ""


@dataclass
class Splits:
    """One data set's rows."""

    train: list[Row] = field(default_factory=list)
    validation: list[Row] = field(default_factory=list)
    test: list[Row] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Rows per split."""
        return {"train": len(self.train), "validation": len(self.validation), "test": len(self.test)}


@dataclass
class SiloData:
    """A silo's name and its rows, all of one task."""

    name: str
    task: Task
    splits: Splits


def check_silo(data: SiloData) -> SiloData:
    """Refuse data nothing can be learned from.

    Raises:
        InputError: no training rows, one class only, or no test rows.
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
    """A task from plain values.

    Raises:
        ValueError: if they are something else.
    """
    if not isinstance(fields, dict) or fields.keys() != {"name", "labels", "metric", "kind"}:
        raise ValueError("not a task")
    labels = fields["labels"]
    texts = [fields["name"], fields["metric"], *labels] if isinstance(labels, list | tuple) else [None]
    if not all(isinstance(text, str) for text in texts) or fields["kind"] not in ("classification", "generation"):
        raise ValueError("not a task")
    if fields["metric"] not in (METRICS if fields["kind"] == "classification" else TEXT_METRICS):
        raise ValueError("not a task's metric")
    return Task(fields["name"], tuple(labels), fields["metric"], fields["kind"])
