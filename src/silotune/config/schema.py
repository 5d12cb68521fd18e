"""The configuration: every key of a run, its values and defaults. Read `docs/architecture.md` for the layers."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from silotune.config.aggregation import AggregationConfig
from silotune.config.attack import AttackConfig
from silotune.config.cache import CacheConfig
from silotune.config.cohort import CohortSize
from silotune.config.comparison import CompareConfig
from silotune.config.evaluation import EvaluationConfig
from silotune.config.federation import FederationConfig
from silotune.config.privacy import PrivacyConfig
from silotune.config.section import Section as Section
from silotune.config.uplink import UplinkConfig

NAME_RULE = "letters, digits, spaces, '.', '_' and '-', beginning with a letter or digit"


def is_name(name: str) -> bool:
    """Whether this can be the name of a silo or task."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._-]*", name) is not None


def _plain_name(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"{name!r} cannot be a name; allowed: {NAME_RULE}")
    return name


Name = Annotated[str, AfterValidator(_plain_name)]
"""The name of a silo or task: it becomes part of paths in the run folder."""


def _distinct(names: list[str]) -> list[str]:
    for position, name in enumerate(names):
        if name in names[:position]:
            raise ValueError(f"{name!r} appears twice")
    return names


def _label_names(labels: object) -> object:
    """Whole numbers are names too; YAML's bare yes and no are not text."""
    if not isinstance(labels, list):
        return labels
    if any(isinstance(label, bool) for label in labels):
        raise ValueError("YAML reads a bare yes, no, on or off as a truth value; put the label in quotes")
    return [str(label) if isinstance(label, int) else label for label in labels]


class Choice(BaseModel):
    """A named thing with options of its own (`method`, `tuner`); the thing itself checks them."""

    model_config = ConfigDict(extra="allow")
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The options, without the name."""
        return dict(self.model_extra or {})


class HeadConfig(Section):
    """The head: kind, scope, and what only some kinds have.

    `mlp` and `linear` read the state chosen by `pooling`. `verbalizer` reads label words at a template's mask:
    `template` (for all tasks, or by task), `words` (label: its words), `multi_token` (words of several tokens),
    `average` (of several words). `lm` writes answers: `template` (or `chat`), `beams`, `max_new_tokens`.
    """

    common: ClassVar = ("scope", "pooling")
    """The keys that stay when another name is chosen."""

    name: Literal["mlp", "linear", "verbalizer", "lm"] = "mlp"
    scope: Literal["private", "shared"] = "private"
    pooling: Literal["first", "mean"] = "first"
    template: str | dict[str, str] | None = None
    words: dict[str, list[str]] | None = None
    multi_token: Literal["refuse", "average"] = "refuse"
    average: Literal["logits", "probabilities"] = "logits"
    beams: int = Field(1, ge=1, le=64)
    max_new_tokens: int = Field(80, ge=1, le=4096)

    @field_validator("words", mode="before")
    @classmethod
    def _lists(cls, words: object) -> object:
        """One word may stand alone; whole numbers are labels too; YAML's bare yes and no are neither."""
        if not isinstance(words, dict):
            return words
        found = {}
        for label, chosen in words.items():
            several = chosen if isinstance(chosen, list) else [chosen]
            for text in (label, *several):
                if isinstance(text, bool):
                    raise ValueError("YAML reads a bare yes, no, true or false as a truth value; put it in quotes")
            if not several or not all(isinstance(word, str) and word.strip() for word in several):
                raise ValueError(f"needs a word, or a list of words, for label {label!r} (got {chosen!r})")
            found[str(label)] = several
        return found

    @model_validator(mode="after")
    def _fitting(self) -> HeadConfig:
        own = {
            "verbalizer": ("template", "words", "multi_token", "average"),
            "lm": ("template", "beams", "max_new_tokens"),
        }
        for key in ("template", "words", "multi_token", "average", "beams", "max_new_tokens"):
            if key not in own.get(self.name, ()) and getattr(self, key) != HeadConfig.model_fields[key].default:
                having = " or ".join(f"head={name}" for name, keys in own.items() if key in keys)
                raise ValueError(f"{key} belongs to {having}, not to head={self.name}")
        return self


class TrainConfig(Section):
    """Local training, per phase. `steps`, where set, counts instead of `epochs`."""

    lr: float = Field(1e-3, gt=0)
    epochs: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1)
    batch_size: int = Field(16, ge=1)
    optimizer: Literal["adam", "adamw", "sgd", "adafactor"] = "adam"
    max_length: int = Field(128, ge=8, le=8192)


class SamplingConfig(Section):
    """Silos a round: a fraction or a count; neither: all. `per_task`: of each task's silos (FedDPA, appendix A.1)."""

    fraction: float | None = Field(None, gt=0, le=1)
    count: int | None = Field(None, ge=1)
    per_task: bool = False

    @model_validator(mode="after")
    def _one(self) -> SamplingConfig:
        if self.fraction is not None and self.count is not None:
            raise ValueError("fraction and count exclude each other; unset one (sampling.fraction= or sampling.count=)")
        if self.per_task and self.fraction is None and self.count is None:
            raise ValueError("per_task: how many of each task's silos? give sampling.fraction or sampling.count too")
        return self


class ServerConfig(Section):
    """The server optimiser (`none` adopts the mean) and its learning rate; the other keys as in Reddi et al. 2021.

    `labels_per_class`: rows of each label that the coordinator has (FedFAME); `labelled_rows`: in all, evenly by label.
    """

    optimizer: Literal["none", "avgm", "adam", "yogi", "adagrad"] = "none"
    lr: float = Field(1.0, gt=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0, allow_inf_nan=False)
    labels_per_class: int | None = Field(None, ge=1)
    labelled_rows: int | None = Field(None, ge=2)

    @model_validator(mode="after")
    def _one(self) -> ServerConfig:
        if self.labels_per_class is not None and self.labelled_rows is not None:
            raise ValueError("labels_per_class and labelled_rows exclude each other; unset one (server.labelled_rows=)")
        return self


class PartitionConfig(Section):
    """How one labelled data set is divided among silos; `none`: silos are as they come.

    `dirichlet` skews labels (`balanced`: at equal sizes), `quantity` sizes, both by `alpha`; `shards` deals
    `shards` pieces of one label (or two) to each silo; `column` makes one silo per value of a column of the data.
    `seed`: where it is not set, that of the data. `min_rows`: what every silo has at least.
    """

    common: ClassVar = ("silos", "alpha", "seed", "min_rows")

    name: Literal["none", "iid", "dirichlet", "quantity", "shards", "column"] = "none"
    silos: int = Field(10, ge=1, le=100_000)
    alpha: float = Field(1.0, gt=0, le=1e6)
    seed: int | None = Field(None, ge=0)
    min_rows: int = Field(1, ge=1)
    balanced: bool = False
    shards: int = Field(2, ge=1, le=1000)
    column: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _fitting(self) -> PartitionConfig:
        for key, owner in (("balanced", "dirichlet"), ("shards", "shards"), ("column", "column")):
            if self.name != owner and getattr(self, key) != PartitionConfig.model_fields[key].default:
                raise ValueError(f"{key} belongs to partition={owner}, not to partition={self.name}")
        if self.name == "column" and self.column is None:
            raise ValueError("which column makes the silos? give partition.column=NAME")
        return self


DATA_SOURCES = ("set", "path", "tasks", "task", "labels", "metric")
"""The keys of `data` that say which rows; one's own silos say it themselves."""


class DataConfig(Section):
    """Where rows come from and how they become splits.

    `set` names a data set the project knows, `path` a folder of task folders, `tasks` the tasks used (all where
    empty). `task` makes them all one task, whose label names are `labels` where their own differ; `metric` replaces
    their own. `merge` puts train and validation together and splits by `ratio`. `seed`: of the choice of rows; the
    run's seed where it is not set. `rows_per_silo` caps a silo before its split, `rows` a data set that is
    partitioned; the other three cap each split (`validation_rows=0`: none are held back, the last round counts).
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

    @field_validator("tasks", mode="before")
    @classmethod
    def _words(cls, tasks: object) -> object:
        return tasks.split(",") if isinstance(tasks, str) else tasks

    _names = field_validator("labels", mode="before")(_label_names)

    @field_validator("tasks", "labels")
    @classmethod
    def _once(cls, names: list[str] | None) -> list[str] | None:
        return names and _distinct(names)

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

    _names = field_validator("labels", mode="before")(_label_names)

    @field_validator("labels")
    @classmethod
    def _once(cls, labels: list[str] | None) -> list[str] | None:
        return labels and _distinct(labels)

    @model_validator(mode="after")
    def _apart(self) -> SiloConfig:
        if len({*self.columns, self.label}) <= len(self.columns):
            raise ValueError(f"text and label must be different columns (got {[*self.columns, self.label]})")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The text column, or the two of a pair."""
        return (self.text,) if isinstance(self.text, str) else tuple(self.text)


class Config(Section):
    """One run. `start`: a LoRA that the adapters begin as (a folder in peft's layout, or what `import` wrote)."""

    description: str = ""
    backbone: str = "default"
    start: str | None = Field(None, min_length=1)
    method: Choice = Choice(name="fedmcp")
    tuner: Choice = Choice(name="bottleneck")
    head: HeadConfig = HeadConfig()
    rounds: int = Field(10, ge=1)
    seed: int = Field(1, ge=0, lt=2**31)
    threads: int | None = Field(None, ge=1, le=1024)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    cache: CacheConfig = CacheConfig()
    cohort: CohortSize = 1
    train: TrainConfig = TrainConfig()
    sampling: SamplingConfig = SamplingConfig()
    aggregation: AggregationConfig = AggregationConfig()
    server: ServerConfig = ServerConfig()
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    uplink: UplinkConfig = UplinkConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    attack: AttackConfig = AttackConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    silos: list[SiloConfig] = []
    federation: FederationConfig = FederationConfig()
    per_method: dict[str, dict[str, Any]] = {}
    compare: CompareConfig = CompareConfig()

    @property
    def data_seed(self) -> int:
        """What the choice of rows is drawn from: the data's own seed, else the run's."""
        return self.seed if self.data.seed is None else self.data.seed

    @field_validator("silos")
    @classmethod
    def _once(cls, silos: list[SiloConfig]) -> list[SiloConfig]:
        _distinct([silo.name for silo in silos])
        return silos

    @model_validator(mode="after")
    def _source(self) -> Config:
        if self.silos:
            for key in DATA_SOURCES:
                if getattr(self.data, key):
                    raise ValueError(f"'silos' and 'data.{key}' exclude each other; give one of them")
        if not self.silos and not self.data.set and not self.data.path and not self.federation.silos:
            raise ValueError("no data: give 'silos', 'data.path' or a preset")
        return self

    @model_validator(mode="after")
    def _noise(self) -> Config:
        local, central = self.uplink.noise is not None, self.aggregation.noise_multiplier is not None
        if local and central:
            raise ValueError("aggregation.noise_multiplier: silos add noise already (uplink); choose one of them")
        given = [key for key in ("epsilon", "delta", "secret") if getattr(self.privacy, key) is not None]
        if given and not local and not central:
            raise ValueError(
                f"privacy.{given[0]}: nothing adds noise; use uplink=clip,laplace, uplink=clip,gaussian or "
                "aggregation.noise_multiplier"
            )
        return self

    @model_validator(mode="after")
    def _rows(self) -> Config:
        partitioned = self.partition.name != "none"
        if partitioned and self.data.rows_per_silo is not None:
            raise ValueError("data.rows_per_silo: not of a data set that is partitioned; use data.rows")
        if not partitioned and self.data.rows is not None:
            raise ValueError("data.rows: of a data set that is partitioned (partition=…); else use data.rows_per_silo")
        return self
