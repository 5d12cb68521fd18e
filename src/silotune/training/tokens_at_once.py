"""`tokens_at_once`: the most tokens in a step's graph (`train.tokens_at_once`); `auto` goes by memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from silotune.config import TrainConfig
from silotune.models.backbone.backbone import Backbone
from silotune.training.cohort import memory_of

_KEPT = 40
"""Upper bound of the values that a block keeps per token for the backward pass, per unit of width."""

_SCORES = 3
"""Values that eager attention keeps per pair of tokens and head."""

_SHARE = 0.7
"""The part of the memory beside the weights that `auto` gives to graphs."""


def tokens_at_once(
    train: TrainConfig, backbone: Backbone, memory: Callable[[torch.device], int] = memory_of
) -> int | None:
    """Return the most tokens of a step's graph; None: any number.

    `auto` goes by the device's whole memory without the backbone's weights: what is free right now could differ on
    resume, and lead to other bits.

    Args:
        train: the section `train`.
        backbone: its shapes, its precision and where it is.
        memory: device → its memory in bytes.
    """
    if train.tokens_at_once != "auto":
        return train.tokens_at_once
    parameters = backbone.model.parameters()
    weights = sum(tensor.numel() * tensor.element_size() for tensor in parameters)
    room = _SHARE * max(0, memory(backbone.device) - weights)
    return max(1, int(room) // bytes_per_token(backbone, train))


def bytes_per_token(backbone: Backbone, train: TrainConfig) -> int:
    """Return an upper bound of what a graph keeps for one token of a row of full length.

    With gradient checkpointing, blocks keep their inputs, and one block at a time keeps all.

    Args:
        backbone: its shapes and precision.
        train: the row's length, and whether blocks are checkpointed.
    """
    config, width = backbone.base.config, backbone.hidden_size
    number = 4 if backbone.precision == "fp32" else 2  # bytes
    scores = 0
    if config._attn_implementation == "eager":
        scores = _SCORES * int(getattr(config, "num_attention_heads", 0)) * train.max_length
    of_a_block = (width * _KEPT + scores) * number
    blocks = int(getattr(config, "num_hidden_layers", 1)) * (2 if config.is_encoder_decoder else 1)
    return of_a_block + blocks * 4 * width if train.gradient_checkpointing else blocks * of_a_block
