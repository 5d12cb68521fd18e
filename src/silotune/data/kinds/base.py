"""The interface of a kind of task: how its rows are read, what outputs are compared with, how they are scored."""

from __future__ import annotations

import math
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from silotune.config.tables import source_name
from silotune.data.readers import Record
from silotune.data.rows import Row
from silotune.data.scores import Counts, Scores
from silotune.data.tasks import Task, label_spelling
from silotune.errors import InputError


@dataclass(frozen=True)
class Reading:
    """How the rows of a file are read.

    Args:
        path: the file.
        columns: the columns of the texts.
        label: the column of the labels or numbers.
        by_index: whether a whole-number label is an index into the task's labels (data sets with a `meta.json`).
        separator: between the labels of one cell.
        declared: whether the configuration names the labels, so that a row's may be spelled otherwise.
        truth_values: whether the labels are truth values of JSON or Parquet.
    """

    path: Path
    columns: Sequence[str]
    label: str
    by_index: bool = False
    separator: str | None = None
    declared: bool = False
    truth_values: bool = False

    def row(self, number: int) -> str:
        """Name a row, for messages."""
        return f"{source_name(self.path)}: row {number}"

    def cell(self, number: int) -> str:
        """Name the cell of a row's label, for messages."""
        return f"{self.row(number)}: {self.label!r}"

    def label_index(self, task: Task, label: str | int, where: str) -> tuple[int, tuple[str, ...]]:
        """Return the index of a row's label, and a remark if the task's label is written otherwise."""
        if self.by_index and isinstance(label, int):
            index, written = label, ""
        else:
            written = str(label)
            index = task.label_index(written)
            if index < 0 and self.declared:
                alike = [name for name in task.labels if label_spelling(name) == label_spelling(written)]
                index = task.label_index(alike[0]) if len(alike) == 1 else -1
        if not 0 <= index < len(task.labels):
            raise InputError(f"{where}: unknown label {label!r}; allowed: {', '.join(task.labels)}")
        name = task.labels[index]
        if written in ("", name):
            return index, ()
        notation = ascii if unicodedata.normalize("NFC", written) == unicodedata.normalize("NFC", name) else repr
        return index, (f"the label {notation(written)} is read as {notation(name)}",)


@dataclass(frozen=True)
class Span:
    """A marked piece of a text.

    Args:
        start: place of its first character (a code point) in the text as it was given.
        end: place behind its last character.
        label: its label.
        text: the piece.
        probability: the mean probability of its words' tags.
    """

    start: int
    end: int
    label: str
    text: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """A model's answer for one text.

    Args:
        label: its label; empty for a number, several labels or spans.
        probabilities: label → probability; they sum to 1, except for several labels. Empty for a number and spans.
        value: the number of a regression.
        labels: the labels with a probability above ½, for a task with several labels.
        spans: the marked pieces of the text, for a task of entities.
    """

    label: str
    probabilities: dict[str, float] = field(default_factory=dict)
    value: float | None = None
    labels: tuple[str, ...] = ()
    spans: tuple[Span, ...] | None = None


class Kind(ABC):
    """What a row is answered with, as every room asks for it; a kind is one file.

    Outputs are a head's logits or numbers, shape (rows, outputs); targets are as `targets` makes them.

    docs/adding-a-kind.md walks through labels in an order. `register_kind` or an entry point of group `silotune.kinds`
    adds a kind.
    """

    name: ClassVar[str]
    rows: ClassVar[str]
    """Its rows in words, for messages."""
    answer: ClassVar[str]
    """One answer in words, for messages."""
    metrics: ClassVar[tuple[str, ...]]
    """The metrics that a task may have; the first is the usual one. They are in percent but those of `lower`."""
    lower: ClassVar[tuple[str, ...]] = ()
    """Those of a kind's own metrics of which less is better, in units of their own."""
    signed: ClassVar[tuple[str, ...]] = ()
    """Those of a kind's own metrics that may be negative, down to −100."""
    constant: ClassVar[str] = ""
    """The best constant answer in words, for tables."""
    baselines: ClassVar[Mapping[str, str]] = {}
    """The kind's own baselines: key → title in tables; the first is the constant answer's, else `majority`."""
    labeled: ClassVar[bool] = True
    """Whether a head's outputs are compared with targets; not so for written answers."""
    least_labels: ClassVar[int] = 2
    """The fewest label names of a task; 0: rows have no labels, but numbers or texts."""
    one_label: ClassVar[bool] = False
    """Whether each row has exactly one of the task's labels, and outputs are a logit of each.

    Such rows also have the metrics of labels, class weights and label smoothing.
    """
    gives: ClassVar[str] = "labels"
    """What `serve` is asked for: `answers`, `labels`, `spans` or `vectors`."""
    several_answers: ClassVar[bool] = False
    """Whether a text may have several right answers, a row each, which are then no duplicates."""
    by_position: ClassVar[bool] = False
    """Whether outputs lie flat, one for each position that a row is read at (`Head.by_position`)."""

    @classmethod
    def reader(cls) -> str:
        """Return the name of the kind whose way from outputs to answers this one has: its own, or an inherited one."""
        kinds = [kind for kind in cls.__mro__ if issubclass(kind, Kind) and "predictions" in vars(kind)]
        return cls.name if kinds[0] is Kind else kinds[0].name

    def outputs(self, task: Task) -> int:
        """Return how many logits a head computes for a row, by default one for each label."""
        return len(task.labels)

    def columns(self, reading: Reading, record: Record) -> Sequence[str]:
        """Return the columns that records must have; `record` is the first one."""
        return [*reading.columns, reading.label]

    @abstractmethod
    def read(self, task: Task, reading: Reading, number: int, record: Record) -> Row:
        """Make the row of a file's record, the `number`-th."""

    def label_names(self, reading: Reading, records: Sequence[Record]) -> tuple[str, ...]:
        """Return the distinct labels of records."""
        return ()

    @abstractmethod
    def known(self, task: Task, value: Any) -> tuple[int, float | tuple[Any, ...] | None]:
        """Return `label` and `target` of a row from its `known` as a JSON value; ValueError if it is none."""

    def label_indices(self, row: Row) -> Sequence[int]:
        """Return the indices of the labels that a row has, each as often as it has it."""
        return (row.label,)

    @abstractmethod
    def text(self, task: Task, row: Row) -> str:
        """Return a row's own answer for display."""

    @abstractmethod
    def targets(self, task: Task, rows: Sequence[Row]) -> Tensor:
        """Return what losses and metrics compare outputs with, a tensor of shape (rows, …)."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the plain loss, shape (): a mean over rows; not asked where heads have one of their own."""
        raise NotImplementedError(f"rows of {self.name} have no loss of their own")

    @abstractmethod
    def scores(self, task: Task, outputs: Tensor, targets: Tensor, drawn: Counts | None = None) -> Mapping[str, Counts]:
        """Return metric → scores of resamples, shape (resamples,); NaN where a score is not defined.

        `drawn` says how often each row counts, shape (resamples, rows); None: each once.
        """

    def judge(self, task: Task, metric: str, outputs: Tensor, targets: Tensor) -> float | None:
        """Return the score by one metric, which is no loss; None where it is not defined."""
        score = float(self.scores(task, outputs, targets)[metric][0])
        return None if math.isnan(score) else score

    @abstractmethod
    def constant_outputs(self, task: Task, targets: Tensor) -> Tensor:
        """Return the outputs of the best constant answer to rows with these targets, the same for all."""

    def by_label(self, task: Task, outputs: Tensor, targets: Tensor) -> tuple[Counts, Counts, Counts] | None:
        """Return hits, true and predicted of each label, each of shape (labels,); None where labels have no such table.

        True are the answers that have the label, predicted those that are predicted to, and hits those of both.
        """
        return None

    @abstractmethod
    def written(self, task: Task, outputs: Tensor, targets: Tensor) -> dict[str, list[Any]]:
        """Return the columns `label` and `predicted` of predictions.parquet as texts, and `probabilities` if any."""

    @abstractmethod
    def resampled(self, task: Task, metric: str, columns: Mapping[str, Sequence[Any]]) -> Callable[[Counts], Counts]:
        """Return what scores resamples of such columns by a metric, from `drawn` as of `scores`, in its own units."""

    def predictions(self, task: Task, outputs: Tensor) -> list[Prediction]:
        """Return what outputs mean for texts; not asked where texts are answered otherwise (`gives`)."""
        raise NotImplementedError(f"texts have no predictions of {self.name}")

    @abstractmethod
    def drawn_row(self, task: Task, texts: tuple[str, ...], draw: float) -> Row:
        """Return a row of these texts whose answer follows from a number between 0 and 1, for canaries."""

    def own_baselines(self, task: Task, train: Sequence[Row], test: Sequence[Row]) -> Scores | None:
        """Return baseline → score on test rows; None: those of `evaluation/baselines.py`."""
        return None
