"""The entries of `silos`, for the user's own files: name, path, columns, task and labels of a silo."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from silotune.config.section import Section
from silotune.config.validators import Name, distinct, label_names


class SiloConfig(Section):
    """One's own silo: a file to be split, or a folder with train, validation and test files.

    `kind: generation`: `text` is the instruction's column (or instruction and input), `label` that of the text to
    write. The metric is accuracy, or rouge1 for generation, where it is not said.
    """

    name: Name
    path: str = Field(min_length=1)
    text: str | list[str] = "text"
    label: str = "label"
    task: Name | None = None
    labels: list[str] | None = Field(None, min_length=2)
    kind: Literal["classification", "generation"] = "classification"
    metric: Literal["accuracy", "f1", "rouge1"] | None = None

    @field_validator("text", mode="before")
    @classmethod
    def _one_or_two(cls, text: object) -> object:
        columns = list(text) if isinstance(text, (list, tuple)) else [text]
        if not 1 <= len(columns) <= 2 or not all(isinstance(column, str) for column in columns):
            raise ValueError(f"must be a text column or a list of two (got {text!r})")
        return text

    _names = field_validator("labels", mode="before")(label_names)

    @field_validator("labels")
    @classmethod
    def _once(cls, labels: list[str] | None) -> list[str] | None:
        return labels and distinct(labels)

    @model_validator(mode="after")
    def _apart(self) -> SiloConfig:
        if len({*self.columns, self.label}) <= len(self.columns):
            raise ValueError(f"text and label must be different columns (got {[*self.columns, self.label]})")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The text column, or the two of a pair."""
        return (self.text,) if isinstance(self.text, str) else tuple(self.text)
