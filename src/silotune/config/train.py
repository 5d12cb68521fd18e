"""The section `train`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from silotune.config.section import Section


class TrainConfig(Section):
    """Local training, per phase. `steps`, where set, counts instead of `epochs`.

    `gradient_checkpointing`: the insides of the backbone's blocks are computed again for the backward pass instead of
    being kept: less memory for about a third more time, the same gradients.
    """

    lr: float = Field(1e-3, gt=0)
    epochs: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1)
    batch_size: int = Field(16, ge=1)
    optimizer: Literal["adam", "adamw", "sgd", "adafactor"] = "adam"
    max_length: int = Field(128, ge=8, le=8192)
    gradient_checkpointing: bool = False
