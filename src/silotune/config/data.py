"""The section `data`: the data set, folder or tasks that rows come from, and how they are split and capped."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from silotune.config.section import Section
from silotune.config.validators import Name, distinct, label_names, listed

DATA_SOURCES = ("set", "path", "tasks", "task", "labels", "metric")
"""The keys of `data` that say which rows; one's own silos say it themselves."""


class DataConfig(Section):
    """Where rows come from and how they become splits.

    `set` names a data set the project knows, `path` a folder of task folders, `tasks` the tasks used (all where
    empty). `task` makes them all one task, whose label names are `labels` where their own differ; `metric` replaces
    their own. `merge` puts train and validation together and splits by `ratio`. `seed`: of the choice of rows; the
    run's seed where it is not set. `rows_per_silo` caps a silo before it is split (its training rows, where it comes
    split), `rows` a data set that is partitioned; the other three cap each split (`validation_rows=0`: none are held
    back, the last round counts).
    `parts`: every set's training rows are dealt evenly among so many silos, judged on the same rows (FedDPA, A.1).
    """

    set: Literal["glue", "mixed6", "sentiment5", "feddpa", "fedprompt", "demo"] | None = None
    path: str | None = None
    tasks: list[Name] = []
    task: Name | None = None
    labels: list[str] | None = Field(None, min_length=2)
    metric: Literal["accuracy", "f1", "rouge1"] | None = None
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
