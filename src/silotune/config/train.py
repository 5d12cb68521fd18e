"""Sections `train` (local training: batches, optimizer, schedule, …), `cache` and `state`; the key `cohort`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from silotune.config.section import Section
from silotune.config.validators import number_or_auto, quoted

CohortSize = Annotated[int | Literal["auto"], number_or_auto("silos", 10_000)]
"""The number of silos that train in one forward; `auto` chooses it by device, or 1 if the tuner cannot do so."""


class CacheConfig(Section):
    """The cache of activations.

    Attributes:
        name: `frozen-prefix` keeps a row's activations of the frozen layers below the lowest adapter across epochs and
            rounds.
        mib: its memory in MiB; the least recently used rows are removed first.
    """

    owners: ClassVar = {"mib": ("frozen-prefix",)}

    name: Literal["none", "frozen-prefix"] = "none"
    mib: int = Field(512, ge=1, le=2**22)


class StateConfig(Section):
    """The states of simulated silos (private parts and memory) between their rounds.

    Attributes:
        memory_mib: the most MiB of them that stay in memory; the others are read from the run folder where they are
            needed. They are then written together, many silos' in one file. Unset: all stay in memory, a file each.
    """

    memory_mib: int | None = Field(None, ge=0, le=2**22)


def _dropout(given: object) -> object:
    if given in (None, "own") or (isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given < 1):
        return given
    raise ValueError(f"must be own (the backbone's own rates), or a rate from 0 to below 1 (got {given!r})")


Dropout = Annotated[float | Literal["own"] | None, BeforeValidator(_dropout)]
"""The backbone's dropout in training; None: its own where it is trained itself, none elsewhere."""


_HEAVIEST = 1_000_000


def _class_weights(given: object) -> object:
    if given in ("none", "balanced"):
        return given
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"must be none, balanced, or a weight for each label, as {{yes: 2}} (got {given!r:.60})")
    quoted(given, "the label")
    for label, weight in given.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= _HEAVIEST:
            raise ValueError(f"the weight of label {label!r} must be above 0, at most {_HEAVIEST:,} (got {weight!r})")
    return {str(label): float(weight) for label, weight in given.items()}


ClassWeights = Annotated[dict[str, float] | Literal["none", "balanced"], BeforeValidator(_class_weights)]


_ADAM_EPSILON = 1e-8
"""Of the paper (Kingma and Ba 2015), torch and transformers' Trainer."""


class TrainConfig(Section):
    """Local training, per phase.

    Attributes:
        lr: the learning rate.
        server_lr: the learning rate of methods that train at the coordinator (FedFAME's η_g); unset: `lr`.
        schedule: how the learning rate falls: not at all, to 0 along a line, or to 0 along a half cosine.
        schedule_over: what `schedule` and `warmup` span: each phase of each round, as the `train()` calls of
            transformers' Trainer, or all rounds together, whichever of them a silo takes part in.
        warmup: the steps over which the learning rate first rises from 0: their number, or below 1 their share of the
            span.
        epochs: passes over a silo's rows.
        steps: the number of optimizer steps, which replaces `epochs` if it is set.
        batch_size: rows per optimizer step.
        batches: how an epoch's rows are cut. `full`: all batches but the last one have `batch_size` rows; `even`: as
            many batches, whose sizes differ by one row at most, each with a loss weighted by its rows, so that every
            row weighs the same.
        optimizer: the silos' optimizer.
        weight_decay: the decay of weights, not of biases and norms; decoupled in `adamw` and `adafactor`, part of the
            gradient in `adam` and `sgd`. Unset: 0.01 of all tensors in `adamw`, none elsewhere.
        adam_epsilon: what Adam and AdamW add to the root of the second moment. Of gradients far below it they make
            small steps; of all others steps of the size of `lr`, however small they are.
        clip_norm: the largest L2 norm of a step's gradient, over all tensors that a silo trains in the phase; longer
            ones are scaled down.
        keep_optimizer: whether a silo keeps its optimizers' states from round to round, beside its private parts;
            otherwise each phase of each round has a new optimizer.
        dropout: the backbone's dropout in views with trained parts: its `own` rates, or one rate everywhere. Unset: its
            own where its weights themselves are trained (`tuner=full`), and none elsewhere.
        label_smoothing: the share of a label's, or of an answer's token's, probability that the loss spreads over all
            of them.
        class_weights: the weights of labels in the loss, which is then a weighted mean over rows: `balanced` are rows /
            (labels × rows of the label), by the silo's training rows; of labels that are not named, 1.
        early_stopping: end the run after so many rounds without a better validation score; unset: never.
        max_length: tokens of a row; longer rows are cut.
        gradient_checkpointing: whether the activations inside the backbone's blocks are computed again for the backward
            pass: less memory for about a third more time, the same gradients.
        tokens_at_once: the most tokens, with padding and in all views with gradient, that a step holds activations of
            for its backward pass; None: the whole batch's. `auto` chooses it by the device's memory.
    """

    lr: float = Field(1e-3, gt=0)
    server_lr: float | None = Field(None, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_over: Literal["round", "run"] = "round"
    warmup: float = Field(0, ge=0, le=1_000_000)
    epochs: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1)
    batch_size: int = Field(16, ge=1)
    batches: Literal["full", "even"] = "full"
    optimizer: Literal["adam", "adamw", "sgd", "adafactor"] = "adam"
    weight_decay: float | None = Field(None, ge=0)
    adam_epsilon: float = Field(_ADAM_EPSILON, ge=1e-12, le=1)
    clip_norm: float | None = Field(None, gt=0)
    keep_optimizer: bool = False
    dropout: Dropout = None
    label_smoothing: float = Field(0, ge=0, lt=1)
    class_weights: ClassWeights = "none"
    early_stopping: int | None = Field(None, ge=1)
    max_length: int = Field(128, ge=8, le=8192)
    gradient_checkpointing: bool = False
    tokens_at_once: Annotated[int | Literal["auto"] | None, number_or_auto("tokens", or_none=True)] = None

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
        if self.keep_optimizer and self.optimizer == "sgd":
            raise ValueError("keep_optimizer: optimizer=sgd keeps no state; allowed: adam, adamw, adafactor")
        return self

    @property
    def steady(self) -> bool:
        """Whether all steps have the same learning rate."""
        return self.schedule == "constant" and not self.warmup

    def with_lr(self, lr: float) -> TrainConfig:
        """Return the same section with another learning rate."""
        return self.model_copy(update={"lr": lr})
