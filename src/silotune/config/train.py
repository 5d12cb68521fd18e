"""Sections `train`, `sampling` and `cache`: the silos of a round, their training, and the activations they keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from silotune.config.section import Section
from silotune.config.validators import number_or_auto, quoted

CohortSize = Annotated[int | Literal["auto"], number_or_auto("silos", 10_000)]
"""The number of silos that train in one forward; `auto` chooses it by device, or 1 if the tuner cannot do so."""


class CacheConfig(Section):
    """The cache of activations."""

    owners: ClassVar = {"mib": ("frozen-prefix",)}

    name: Literal["none", "frozen-prefix"] = Field(
        default="none",
        description="`frozen-prefix` keeps a row's activations of the frozen layers below the lowest adapter across "
        "epochs and rounds.",
    )
    mib: int = Field(
        default=512, ge=1, le=2**22, description="MiB of the cache; the least recently used rows are removed first."
    )


def _dropout(value: object) -> object:
    if value in (None, "own") or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1):
        return value
    raise ValueError(f"must be own (the backbone's own rates), or a rate from 0 to below 1 (got {value!r})")


Dropout = Annotated[float | Literal["own"] | None, BeforeValidator(_dropout)]
"""The backbone's dropout in training; None: its own where it is trained itself, none elsewhere."""


_HEAVIEST = 1_000_000


def _class_weights(value: object) -> object:
    if value in ("none", "balanced"):
        return value
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"must be none, balanced, or a weight for each label, as {{yes: 2}} (got {value!r:.60})")
    quoted(value, "the label")
    for label, weight in value.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= _HEAVIEST:
            raise ValueError(f"the weight of label {label!r} must be above 0, at most {_HEAVIEST:,} (got {weight!r})")
    return {str(label): float(weight) for label, weight in value.items()}


ClassWeights = Annotated[dict[str, float] | Literal["none", "balanced"], BeforeValidator(_class_weights)]


_ADAM_EPSILON = 1e-8
"""The value in the paper (Kingma and Ba 2015), in torch and in transformers' Trainer."""


class TrainConfig(Section):
    """Local training, per phase."""

    lr: float = Field(default=1e-3, gt=0, description="the learning rate.")
    server_lr: float | None = Field(
        default=None,
        gt=0,
        description="the learning rate of methods that train at the coordinator (FedFAME's η_g); unset: `lr`.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="decay of the learning rate to 0: none, linear, or a half cosine.",
    )
    schedule_over: Literal["round", "run"] = Field(
        default="round",
        description="span of `schedule` and `warmup`: each phase of each round, as in transformers' Trainer, or all "
        "rounds of the run, also those that a silo misses.",
    )
    warmup: float = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="steps in which the learning rate rises from 0: a number, or below 1 a share of the span.",
    )
    epochs: int = Field(default=1, ge=1, description="passes over a silo's rows.")
    steps: int | None = Field(default=None, ge=1, description="optimizer steps; replaces `epochs`.")
    batch_size: int = Field(default=16, ge=1, description="rows per optimizer step.")
    batches: Literal["full", "even"] = Field(
        default="full",
        description="`full`: all batches but the last have `batch_size` rows. `even`: the same number of batches, whose"
        " sizes differ by at most one row, with losses weighted so that every row counts the same.",
    )
    optimizer: Literal["adam", "adamw", "sgd", "adafactor"] = Field(default="adam", description="the silos' optimizer.")
    momentum: float = Field(
        default=0, ge=0, lt=1, description="momentum of `sgd`; over rounds too with `keep_optimizer`."
    )
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        description="decay of weights, not of biases and norms; decoupled in `adamw` and `adafactor`, part of the "
        "gradient in `adam` and `sgd`. Unset: 0.01 on all tensors in `adamw`, else none.",
    )
    adam_epsilon: float = Field(
        default=_ADAM_EPSILON,
        ge=1e-12,
        le=1,
        description="ε of Adam and AdamW. Gradients far below it make small steps; all others steps of about `lr`.",
    )
    clip_norm: float | None = Field(
        default=None,
        gt=0,
        description="largest L2 norm of a step's gradient over all tensors that the phase trains; longer ones are "
        "scaled down.",
    )
    keep_optimizer: bool = Field(
        default=False,
        description="keep a silo's optimizer states from round to round; `false`: a new optimizer in each phase of each"
        " round.",
    )
    dropout: Dropout = Field(
        default=None,
        description="the backbone's dropout in views with trained parts: its `own` rates, or one rate everywhere. "
        "Unset: its own with `tuner=full`, else none.",
    )
    label_smoothing: float = Field(
        default=0,
        ge=0,
        lt=1,
        description="share of the target probability (of labels, or of answer tokens) that is spread over all classes.",
    )
    class_weights: ClassWeights = Field(
        default="none",
        description="label → weight in the loss, a weighted mean over rows (1 if not named). `balanced`: rows / (labels"
        " × rows of the label), counted in the silo's training rows.",
    )
    early_stopping: int | None = Field(
        default=None,
        ge=1,
        description="end the run after this many rounds without a better validation score; unset: never.",
    )
    max_length: int = Field(
        default=128, ge=8, le=8192, description="maximum tokens per row; longer rows are truncated."
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="recompute activations inside blocks in the backward pass: less memory, about a third more time, "
        "equal gradients.",
    )
    tokens_at_once: Annotated[int | Literal["auto"] | None, number_or_auto("tokens", or_none=True)] = Field(
        default=None,
        description="most tokens (with padding, over all views with gradient) whose activations are held for a backward"
        " pass; None: the whole batch. `auto`: by the device's memory.",
    )

    @field_validator("warmup")
    @classmethod
    def _share_or_number(cls, warmup: float) -> float:
        if warmup > 1 and warmup != int(warmup):
            raise ValueError(f"must be a number of steps, or a share below 1 (got {warmup:g})")
        return warmup

    @model_validator(mode="after")
    def _with_effect(self) -> TrainConfig:
        if self.schedule_over == "run" and self.steady:
            raise ValueError("schedule_over: nothing changes the learning rate; give train.schedule or train.warmup")
        if self.optimizer not in ("adam", "adamw") and self.adam_epsilon != _ADAM_EPSILON:
            raise ValueError(f"adam_epsilon: belongs to optimizer=adam or adamw, not to {self.optimizer}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum: belongs to optimizer=sgd, not to {self.optimizer}")
        if self.keep_optimizer and self.optimizer == "sgd" and not self.momentum:
            raise ValueError("keep_optimizer: optimizer=sgd keeps no state but momentum; give train.momentum=0.9")
        return self

    @property
    def steady(self) -> bool:
        """Whether all steps have the same learning rate."""
        return self.schedule == "constant" and not self.warmup

    def with_lr(self, lr: float) -> TrainConfig:
        """Return the same section with another learning rate."""
        return self.replace(lr=lr)


class SamplingConfig(Section):
    """The silos of a round: a fraction or a number of them; all silos if neither key is set."""

    fraction: float | None = Field(default=None, gt=0, le=1, description="the fraction of the silos, rounded up.")
    count: int | None = Field(default=None, ge=1, description="the number of silos.")
    per_task: bool = Field(
        default=False, description="apply the fraction or number to each task's silos (FedDPA, appendix A.1)."
    )

    @model_validator(mode="after")
    def _fraction_or_count(self) -> SamplingConfig:
        if self.fraction is not None and self.count is not None:
            raise ValueError("fraction and count exclude each other; unset one (sampling.fraction= or sampling.count=)")
        if self.per_task and self.fraction is None and self.count is None:
            raise ValueError("per_task: how many of each task's silos? give sampling.fraction or sampling.count too")
        return self
