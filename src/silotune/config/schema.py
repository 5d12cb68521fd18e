"""The configuration: every key of a run, its values and defaults. Read `docs/architecture.md` for the layers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A group of keys. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


class Choice(BaseModel):
    """A named thing with options of its own (`method`, `tuner`); the thing itself checks them."""

    model_config = ConfigDict(extra="allow")
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The options, without the name."""
        return dict(self.model_extra or {})


class HeadConfig(Section):
    """The classifier: kind, scope and which states it reads."""

    name: Literal["mlp", "linear"] = "mlp"
    scope: Literal["private", "shared"] = "private"
    pooling: Literal["first", "mean"] = "first"


class TrainConfig(Section):
    """Local training, per phase. `steps`, where set, counts instead of `epochs`."""

    lr: float = Field(1e-3, gt=0)
    epochs: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1)
    batch_size: int = Field(16, ge=1)
    optimizer: Literal["adam", "adamw", "sgd", "adafactor"] = "adam"
    max_length: int = Field(128, ge=8, le=8192)


class SamplingConfig(Section):
    """Silos a round: a fraction or a count; neither: all."""

    fraction: float | None = Field(None, gt=0, le=1)
    count: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one(self) -> SamplingConfig:
        if self.fraction is not None and self.count is not None:
            raise ValueError("fraction and count exclude each other")
        return self


class AggregationConfig(Section):
    """How updates are combined; `max_norm` refuses larger updates."""

    name: Literal["uniform", "samples"] = "samples"
    max_norm: float | None = Field(None, gt=0)


class DataConfig(Section):
    """Where rows come from and how they become splits.

    `set` names a data set the project knows, `path` a folder of task folders, `tasks` the tasks used (all where
    empty). `merge` puts train and validation together and splits by `ratio`. `seed`: of the choice of rows; the run's
    seed where it is not set. `rows_per_silo` caps a silo before its split; the other three cap ready splits.
    """

    set: Literal["glue", "mixed6", "sentiment5", "demo"] | None = None
    path: str | None = None
    tasks: list[str] = []
    task: str | None = None
    merge: bool = False
    ratio: tuple[float, float, float] = (0.6, 0.2, 0.2)
    seed: int | None = Field(None, ge=0)
    rows_per_silo: int | None = Field(None, ge=10)
    train_rows: int | None = Field(None, ge=2)
    validation_rows: int | None = Field(None, ge=1)
    test_rows: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _ratio(self) -> DataConfig:
        if min(self.ratio) <= 0 or abs(sum(self.ratio) - 1) > 1e-6:
            raise ValueError("ratio must be three positive shares that sum to 1")
        return self


class SiloConfig(Section):
    """One's own silo: a file to be split, or a folder with train, validation and test files."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")
    path: str
    text: str | tuple[str] | tuple[str, str] = "text"
    label: str = "label"
    task: str | None = None
    labels: list[str] | None = Field(None, min_length=2)
    metric: Literal["accuracy", "f1"] = "accuracy"

    @property
    def columns(self) -> tuple[str, ...]:
        """The text column, or the two of a pair."""
        return (self.text,) if isinstance(self.text, str) else tuple(self.text)


class Config(Section):
    """One run."""

    description: str = ""
    backbone: str = "default"
    method: Choice = Choice(name="fedmcp")
    tuner: Choice = Choice(name="bottleneck")
    head: HeadConfig = HeadConfig()
    rounds: int = Field(10, ge=1)
    seed: int = Field(1, ge=0, lt=2**31)
    threads: int | None = Field(None, ge=1)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    train: TrainConfig = TrainConfig()
    sampling: SamplingConfig = SamplingConfig()
    aggregation: AggregationConfig = AggregationConfig()
    data: DataConfig = DataConfig()
    silos: list[SiloConfig] = []
    per_method: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def _source(self) -> Config:
        if self.silos and (self.data.set or self.data.path):
            raise ValueError("'silos' and 'data.set'/'data.path' exclude each other")
        if not self.silos and not self.data.set and not self.data.path:
            raise ValueError("no data: give 'silos', 'data.path' or a preset")
        return self
