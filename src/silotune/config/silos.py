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
        label: the label column; for regression the column of numbers, for generation that of the text to generate.
        task: silos of one task share label names; unset, the silo's name.
        labels: the label names; unset, those in the training rows.
        kind: what a row is answered with: one label (classification), a number (regression), any number of labels
            (multilabel), or a text (generation).
        metric: unset, accuracy; pearson_spearman for regression, micro_f1 for multilabel, rouge1 for generation.
        encoding: the encoding of text files, such as latin-1 or cp1252.
        rank: the LoRA rank of this silo's adapters, up to `tuner.r`; a resolved configuration has it in `tuner.ranks`.
        positive: the label that F1 is about. Without it `metric: f1` is the mean over all labels (`macro_f1`).
        label_separator: what stands between the labels of one cell, with `kind: multilabel`; unset, a comma.
    """

    name: Name
    path: str = Field(min_length=1)
    text: str | list[str] = "text"
    label: str = "label"
    task: Name | None = None
    labels: list[str] | None = Field(None, min_length=2)
    kind: Literal["classification", "regression", "multilabel", "generation"] = "classification"
    metric: Metric | None = None
    positive: str | None = Field(None, min_length=1)
    encoding: str = "utf-8"
    rank: int | None = Field(None, ge=1)
    label_separator: str | None = Field(None, min_length=1)

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

    @model_validator(mode="after")
    def _of_kind(self) -> SiloConfig:
        if self.label_separator is not None and self.kind != "multilabel":
            raise ValueError("label_separator belongs to kind: multilabel")
        if self.positive is not None and self.kind in ("regression", "multilabel"):
            raise ValueError(f"positive is a label of kind: classification (got kind: {self.kind})")
        if self.labels is not None and self.kind == "regression":
            raise ValueError("labels are those of classification; with kind: regression a row has a number")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The text column, or the two of a pair."""
        return (self.text,) if isinstance(self.text, str) else tuple(self.text)
