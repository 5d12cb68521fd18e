"""Section `data`: the data set, folder or tasks that rows come from, how they are split, and how many are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from silotune.config.section import Section
from silotune.config.validators import Metric, Name, distinct, label_name, label_names, listed

DATA_SOURCES = ("set", "path", "tasks", "task", "labels", "metric", "positive")
"""The keys of `data` that choose rows; they exclude the section `silos`, whose entries name their own files."""


class DataConfig(Section):
    """The source of rows, and how they become splits.

    Attributes:
        set: a data set that silotune knows by name.
        path: a folder of task folders.
        tasks: the tasks to use; if empty, all.
        task: one task name for all silos, so that they may share a head.
        labels: the label names of `task`, if the data sets' own names differ.
        metric: replaces the data sets' own metric.
        positive: the label that F1 is about; unset, what the data sets say, else label 1 of two.
        merge: whether train and validation are joined and split again by `ratio`.
        ratio: shares of train, validation and test.
        seed: seed of the choice of rows; unset, the run's seed.
        rows_per_silo: cap on a silo's rows before they are split; on its training rows if the data set is split.
        rows: cap on the rows of a data set that is partitioned.
        train_rows: cap on the training split.
        validation_rows: cap on the validation split. With 0 no rows are held back, and the last round counts as best.
        test_rows: cap on the test split.
        parts: the number of silos among which each task's training rows are divided evenly; they share its validation
            and test rows (FedDPA, appendix A.1).
    """

    set: Literal["glue", "mixed6", "sentiment5", "feddpa", "fedprompt", "demo"] | None = None
    path: str | None = None
    tasks: list[Name] = []
    task: Name | None = None
    labels: list[str] | None = Field(None, min_length=2)
    metric: Metric | None = None
    positive: str | None = Field(None, min_length=1)
    merge: bool = False
    ratio: tuple[float, float, float] = (0.6, 0.2, 0.2)
    seed: int | None = Field(None, ge=0)
    rows_per_silo: int | None = Field(None, ge=10)
    rows: int | None = Field(None, ge=2)
    train_rows: int | None = Field(None, ge=2)
    validation_rows: int | None = Field(None, ge=0)
    test_rows: int | None = Field(None, ge=1)
    parts: int = Field(1, ge=1, le=100_000)

    _words = field_validator("tasks", mode="before")(listed)
    _names = field_validator("labels", mode="before")(label_names)
    _name = field_validator("positive", mode="before")(label_name)

    @field_validator("tasks", "labels")
    @classmethod
    def _once(cls, names: list[str] | None) -> list[str] | None:
        return names and distinct(names)

    @model_validator(mode="after")
    def _of_one_task(self) -> DataConfig:
        if self.labels is not None and self.task is None:
            raise ValueError("labels are those of one task for all silos; give data.task too")
        return self

    @field_validator("ratio")
    @classmethod
    def _shares(cls, ratio: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(ratio) <= 0 or abs(sum(ratio) - 1) > 1e-6:
            raise ValueError(f"must be three positive shares that sum to 1 (got {list(ratio)})")
        return ratio
