"""Readings: from the last layer's states to one vector per row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from silotune.data.tokenized import Inputs
from silotune.models.backbone.forward_plan import ForwardPlan

Pooling = Callable[[Tensor, Inputs], Tensor]
"""(last layer's states (rows, tokens, hidden), inputs) → one tensor whose first dimension is rows."""


def first(states: Tensor, _: Inputs) -> Tensor:
    """The first token's state: [CLS] or <s>."""
    return states[:, 0]


def mean(states: Tensor, inputs: Inputs) -> Tensor:
    """The mean over real tokens."""
    mask = _mask(inputs).unsqueeze(-1).to(states.dtype)
    return (states * mask).sum(1) / mask.sum(1)


def last(states: Tensor, inputs: Inputs) -> Tensor:
    """The last real token's state: all that a causal model knows of the text."""
    mask = _mask(inputs)
    positions = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
    return states[torch.arange(len(states), device=states.device), positions]


def _mask(inputs: Inputs) -> Tensor:
    """The mask that goes with the states: an encoder–decoder's are its decoder's, where it has decoder tokens."""
    return inputs["decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask"]


POOLINGS: dict[str, Pooling] = {"first": first, "mean": mean, "last": last}


HeadReading = Callable[[Tensor, Inputs, ForwardPlan], Tensor]
"""A reading that a head brings along; it also sees the plan under which the states came about."""
