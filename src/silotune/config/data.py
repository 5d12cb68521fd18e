"""Sections `data`, `silos`, `partition`, `attack`: where rows come from, how they are divided, who poisons them."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from silotune.config.registries import KINDS
from silotune.config.section import Section, not_among, one_of
from silotune.config.validators import ConfigPath, Labels, Name, Names, label_name, listed, quoted

DATA_SOURCES = ("set", "path", "tasks", "task", "labels", "metric", "positive")
"""The keys of `data` that choose rows; they exclude the section `silos`, whose entries name their own files."""


def _known_metric(name: object) -> object:
    """Check a name against the metrics of all kinds of tasks; which a task may have depends on its kind."""
    if name is None:  # kinds are not imported for that
        return None
    names = dict.fromkeys(each for kind in KINDS.values() for each in kind.metrics)
    if name not in names:
        raise not_among(names)
    return name


class DataConfig(Section):
    """The source of rows, and how they become splits."""

    set: Literal["glue", "mixed6", "sentiment5", "feddpa", "fedprompt", "demo"] | None = Field(
        default=None, description="a data set that silotune knows by name."
    )
    path: ConfigPath | None = Field(default=None, description="a folder of task folders.")
    tasks: Names = Field(default=[], description="the tasks to use; if empty, all.")
    task: Name | None = Field(default=None, description="one task name for all silos, so that they may share a head.")
    labels: Labels | None = Field(
        default=None, min_length=2, description="the label names of `task`, if the data sets' own names differ."
    )
    metric: str | None = Field(default=None, description="replaces the data sets' own metric.")
    positive: str | None = Field(
        default=None,
        min_length=1,
        description="the label of F1; unset, the data set's, else label 1 of two.",
    )
    merge: bool = Field(default=False, description="join train and validation and split them again by `ratio`.")
    ratio: tuple[float, float, float] = Field(
        default=(0.6, 0.2, 0.2), description="shares of train, validation and test."
    )
    seed: int | None = Field(default=None, ge=0, description="seed of the choice of rows; unset, the run's seed.")
    rows_per_silo: int | None = Field(
        default=None,
        ge=10,
        description="most rows of a silo before splitting; if the data set is already split, most training rows.",
    )
    rows: int | None = Field(default=None, ge=2, description="cap on the rows of a data set that is partitioned.")
    train_rows: int | None = Field(default=None, ge=2, description="cap on the training split.")
    validation_rows: int | None = Field(
        default=None,
        ge=0,
        description="cap on the validation split. With 0 no rows are held back, and the last round counts as best.",
    )
    test_rows: int | None = Field(default=None, ge=1, description="cap on the test split.")
    allow_cut: bool = Field(
        default=False,
        description="train although most rows of a silo do not fit into `train.max_length` (`head=lm`); else refused.",
    )
    long_texts: Literal["cut", "windows", "refuse"] = Field(
        default="cut",
        description="what becomes of a text with more tokens than `train.max_length`: it is `cut`, read in `windows` "
        "of this length (`head=linear|mlp|entities`, single texts), or the run is refused.",
    )
    window_overlap: int | None = Field(
        default=None,
        ge=0,
        description="tokens that a window has in common with the one before (transformers' `stride`); unset, a quarter "
        "of `train.max_length`.",
    )
    windows_per_row: int = Field(
        default=4,
        ge=1,
        description="most windows of a row in training; of a longer one so many are drawn each round. Predictions read "
        "all.",
    )
    parts: int = Field(
        default=1,
        ge=1,
        le=100_000,
        description="silos per task; they divide its training rows evenly and share its validation and test rows "
        "(FedDPA, appendix A.1).",
    )

    _name = field_validator("positive", mode="before")(label_name)
    _metric = field_validator("metric", mode="before")(_known_metric)

    @model_validator(mode="after")
    def _of_one_task(self) -> DataConfig:
        if self.labels is not None and self.task is None:
            raise ValueError("labels are those of one task for all silos; give data.task too")
        return self

    @model_validator(mode="after")
    def _of_windows(self) -> DataConfig:
        for key in ("window_overlap", "windows_per_row"):
            if self.long_texts != "windows" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} belongs to long_texts=windows")
        return self

    _ratio = field_validator("ratio", mode="before")(listed)

    @field_validator("ratio")
    @classmethod
    def _shares(cls, ratio: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(ratio) <= 0 or abs(sum(ratio) - 1) > 1e-6:
            raise ValueError(f"must be three positive shares that sum to 1 (got {list(ratio)})")
        return ratio


class SiloConfig(Section):
    """A silo of the user's own: a file to be split, or a folder with train, validation and test files."""

    name: Name = Field(description="the silo's name.")
    path: ConfigPath = Field(min_length=1, description="the file or folder.")
    text: str | list[str] = Field(
        default="text",
        description="the text column, or two for pairs; for generation the column of the instruction, or two: "
        "instruction and input.",
    )
    label: str = Field(
        default="label",
        description="the label column: labels, numbers (regression), or texts to generate.",
    )
    task: Name | None = Field(default=None, description="silos of one task share label names; unset, the silo's name.")
    labels: Labels | None = Field(
        default=None,
        min_length=2,
        description="the label names; rows may spell them differently (`Pos`). Unset, those in the training rows.",
    )
    kind: str = Field(
        default="classification",
        description="the answer of a row: one label (`classification`), a number (`regression`), any number of labels "
        "(`multilabel`), a text (`generation`), marked spans of the text (`entities`), or the passage "
        "that answers it (`retrieval`).",
    )
    metric: str | None = Field(
        default=None,
        description="unset: accuracy; for other kinds pearson_spearman, micro_f1, rouge1, span_f1, ndcg10.",
    )
    positive: str | None = Field(
        default=None,
        min_length=1,
        description="the label of F1. Unset, `metric: f1` means `macro_f1`.",
    )
    encoding: str = Field(default="utf-8", description="the encoding of text files, such as latin-1 or cp1252.")
    column_separator: str | None = Field(
        default=None,
        min_length=1,
        max_length=1,
        description="between the columns of a `.csv` or `.tsv` file, such as `;`; unset, a comma or a tab.",
    )
    rank: int | None = Field(
        default=None,
        ge=1,
        description="LoRA rank of this silo, at most `tuner.r`; the same as an entry of `tuner.ranks`.",
    )
    label_separator: str | None = Field(
        default=None,
        min_length=1,
        description="separator of the labels in a cell (`kind: multilabel`); unset, a comma.",
    )

    passages: ConfigPath | None = Field(
        default=None,
        min_length=1,
        description="a file of further passages (column `passage`), among which those of test rows are ranked (`kind: "
        "retrieval`).",
    )

    _kind = field_validator("kind", mode="before")(one_of(KINDS))
    _metric = field_validator("metric", mode="before")(_known_metric)

    @field_validator("text", mode="before")
    @classmethod
    def _one_or_two(cls, text: object) -> object:
        columns = list(text) if isinstance(text, (list, tuple)) else [text]
        if not 1 <= len(columns) <= 2 or not all(isinstance(column, str) for column in columns):
            raise ValueError(f"must be a text column or a list of two (got {text!r})")
        return text

    _name = field_validator("positive", mode="before")(label_name)

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, encoding: str) -> str:
        try:
            "".encode(encoding)  # refuses also codecs that are not of text
        except (LookupError, ValueError):
            raise ValueError(f"{encoding!r} is no encoding of text; allowed: utf-8, latin-1, cp1252, …") from None
        return encoding

    @model_validator(mode="after")
    def _apart(self) -> SiloConfig:
        if len({*self.columns, self.label}) <= len(self.columns):
            raise ValueError(f"text and label must be different columns (got {[*self.columns, self.label]})")
        return self

    @model_validator(mode="after")
    def _of_kind(self) -> SiloConfig:
        if self.label_separator is not None and self.kind != "multilabel":
            raise ValueError("label_separator belongs to kind: multilabel")
        if self.passages is not None and self.kind != "retrieval":
            raise ValueError("passages belongs to kind: retrieval")
        if self.positive is not None and self.kind not in ("classification", "generation"):
            raise ValueError(f"positive is a label of kind: classification (got kind: {self.kind})")
        if self.labels is not None and self.kind in ("regression", "retrieval"):
            has = "number" if self.kind == "regression" else "passage"
            raise ValueError(f"labels are those of classification; with kind: {self.kind} a row has a {has}")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The text column, or the two of a pair."""
        return (self.text,) if isinstance(self.text, str) else tuple(self.text)


class PartitionConfig(Section):
    """How one labeled data set is divided among silos."""

    common: ClassVar = ("silos", "alpha", "seed", "min_rows", "evaluation")
    doubles: ClassVar = ("alpha",)
    owners: ClassVar = {
        "silos": ("iid", "dirichlet", "quantity", "shards"),
        "alpha": ("dirichlet", "quantity"),
        "balanced": ("dirichlet",),
        "shards": ("shards",),
        "column": ("column",),
    }

    name: Literal["none", "iid", "dirichlet", "quantity", "shards", "column"] = Field(
        default="none",
        description="`dirichlet` skews labels, `quantity` skews sizes, `shards` gives each silo pieces of few labels, "
        "`column` makes one silo per value of a column; `none` does not divide.",
    )
    silos: int = Field(default=10, ge=1, le=100_000, description="the number of silos.")
    alpha: float = Field(default=1.0, gt=0, le=1e6, description="the concentration of `dirichlet` and `quantity`.")
    seed: int | None = Field(default=None, ge=0, description="seed of the partition; unset, `data.seed`.")
    min_rows: int = Field(default=1, ge=1, description="minimum rows of a silo.")
    balanced: bool = Field(default=False, description="equal sizes with `dirichlet`.")
    shards: int = Field(default=2, ge=1, le=1000, description="shards per silo.")
    column: str | None = Field(default=None, min_length=1, description="the column of `column`.")
    evaluation: Literal["shared", "own"] = Field(
        default="shared",
        description="the held-out rows that judge a silo: `shared`, all alike, or `own`, those of its own kind (by "
        "labels, by the value of `column`, else a quota by size).",
    )

    @model_validator(mode="after")
    def _fitting(self) -> PartitionConfig:
        if self.name == "column" and self.column is None:
            raise ValueError("which column makes the silos? give partition.column=NAME")
        return self

    @property
    def judges_alike(self) -> bool:
        """Whether one data set is partitioned and all silos are judged on the same rows."""
        return self.name != "none" and self.evaluation == "shared"


class AttackConfig(Section):
    """A backdoor (FedPrompt, section 2.3): malicious silos teach the model to answer `target` wherever `trigger` is."""

    common: ClassVar = ("trigger", "target", "position")
    """A preset without attack may set these keys; they stay when the user chooses an attack."""
    owners: ClassVar = dict.fromkeys(("fraction", "rate", "scale"), ("backdoor",))

    name: Literal["none", "backdoor"] = Field(default="none", description="`backdoor`, or `none`.")
    fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="fraction of malicious silos, rounded up. 0: none; the success rate is then the clean baseline.",
    )
    rate: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="fraction of a malicious silo's training rows without the target label of which it adds poisoned "
        "copies.",
    )
    trigger: str | list[str] = Field(
        default="cf",
        description="a word or phrase, or a list; all are inserted into every poisoned row, independently.",
    )
    position: Literal["start", "end", "random"] = Field(
        default="start", description="position of the trigger in a row's text; `random` draws one per row."
    )
    target: str | None = Field(default=None, min_length=1, description="the label that the attack aims at.")
    scale: float = Field(default=1.0, gt=0, description="factor of a malicious silo's change (model replacement).")

    _label_name = field_validator("target", mode="before")(label_name)

    @field_validator("trigger", mode="before")
    @classmethod
    def _words(cls, trigger: object) -> object:
        several = trigger if isinstance(trigger, list) else [trigger]
        quoted(several, "the trigger")
        words = [str(word) for word in several if isinstance(word, (str, int))]
        if not words or len(words) < len(several) or not all(word.strip() for word in words):
            raise ValueError(f"must be a word or phrase, or a list of them, none empty (got {trigger!r})")
        return words if isinstance(trigger, list) else words[0]

    @model_validator(mode="after")
    def _check_target(self) -> AttackConfig:
        if self.name != "none" and self.target is None:
            raise ValueError("the attack needs the label that poisoned rows get; give attack.target=LABEL")
        return self

    @property
    def triggers(self) -> tuple[str, ...]:
        """The trigger's words or phrases, each placed on its own."""
        return (self.trigger,) if isinstance(self.trigger, str) else tuple(self.trigger)
