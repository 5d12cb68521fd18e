"""Sections `train` (local training) and `cache` (of activations), and the key `cohort` (silos trained together)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from silotune.config.section import Section


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


_MOST = 10_000


def _size(given: object) -> object:
    if given == "auto" or (isinstance(given, int) and 1 <= given <= _MOST):
        return given
    raise ValueError(f"must be a number of silos (1 to {_MOST}), or auto (got {given!r})")


CohortSize = Annotated[int | Literal["auto"], BeforeValidator(_size)]
"""The number of silos that train in one forward; `auto` chooses it by device, or 1 if the tuner cannot do so."""


def _tokens(given: object) -> object:
    if given in (None, "auto") or (isinstance(given, int) and not isinstance(given, bool) and given >= 1):
        return given
    raise ValueError(f"must be a number of tokens (at least 1), or auto (got {given!r})")


TokensAtOnce = Annotated[int | Literal["auto"] | None, BeforeValidator(_tokens)]


class TrainConfig(Section):
    """Local training, per phase.

    Attributes:
        lr: the learning rate.
        epochs: passes over a silo's rows.
        steps: the number of optimizer steps, which replaces `epochs` if it is set.
        batch_size: rows per optimizer step.
        optimizer: the silos' optimizer.
        max_length: tokens of a row; longer rows are cut.
        gradient_checkpointing: whether the activations inside the backbone's blocks are computed again for the backward
            pass: less memory for about a third more time, the same gradients.
        tokens_at_once: the most tokens, with padding and in all views with gradient, that a step holds activations of
            for its backward pass; None: the whole batch's. `auto` chooses it by the device's memory.
    """

    lr: float = Field(1e-3, gt=0)
    epochs: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1)
    batch_size: int = Field(16, ge=1)
    optimizer: Literal["adam", "adamw", "sgd", "adafactor"] = "adam"
    max_length: int = Field(128, ge=8, le=8192)
    gradient_checkpointing: bool = False
    tokens_at_once: TokensAtOnce = None
