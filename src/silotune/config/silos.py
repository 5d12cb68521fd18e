"""`SiloConfig`, one item of the list `silos` for a user's own files: name, path, columns, task, labels and metric."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from silotune.config.section import Section
from silotune.config.validators import Metric, Name, distinct, label_name, label_names


class SiloConfig(Section):
    """A silo of the user's own: a file to be split, or a folder with train, validation and test files.

    Attributes:
        name: the silo's name.
        path: the file or folder.
        text: the text column, or the two columns of a pair; for generation the instruction's column, or those of
            instruction and input.
        label: the label column; for generation the column of the text to generate.
        task: silos of one task share label names; unset, the silo's name.
        labels: the label names; unset, those in the training rows.
        kind: classification or generation.
        metric: unset, accuracy, or rouge1 for generation.
        encoding: the encoding of text files, such as latin-1 or cp1252.
        rank: the LoRA rank of this silo's adapters, up to `tuner.r`; a resolved configuration has it in `tuner.ranks`.
        positive: the label that F1 is about. Without it `metric: f1` is the mean over all labels (`macro_f1`).
    """

    name: Name
    path: str = Field(min_length=1)
    text: str | list[str] = "text"
    label: str = "label"
    task: Name | None = None
    labels: list[str] | None = Field(None, min_length=2)
    kind: Literal["classification", "generation"] = "classification"
    metric: Metric | None = None
    positive: str | None = Field(None, min_length=1)
    encoding: str = "utf-8"
    rank: int | None = Field(None, ge=1)

    @field_validator("text", mode="before")
    @classmethod
    def _one_or_two(cls, text: object) -> object:
        columns = list(text) if isinstance(text, (list, tuple)) else [text]
        if not 1 <= len(columns) <= 2 or not all(isinstance(column, str) for column in columns):
            raise ValueError(f"must be a text column or a list of two (got {text!r})")
        return text

    _names = field_validator("labels", mode="before")(label_names)
    _name = field_validator("positive", mode="before")(label_name)

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, encoding: str) -> str:
        try:
            "".encode(encoding)  # refuses also codecs that are not of text
        except (LookupError, ValueError):
            raise ValueError(f"{encoding!r} is no encoding of text; allowed: utf-8, latin-1, cp1252, …") from None
        return encoding

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
