"""Pool the last layer's states to one vector per row: the first token, the mean, or the last token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from silotune.data.tokenized import Inputs
from silotune.models.backbone.forward_plan import ForwardPlan

Pooling = Callable[[Tensor, Inputs], Tensor]
"""(last layer's states of shape (rows, tokens, hidden), inputs) → tensor of shape (rows, …)."""


def first(states: Tensor, _: Inputs) -> Tensor:
    """Return the first token's state ([CLS] or <s>): (rows, tokens, hidden) → (rows, hidden)."""
    return states[:, 0]


def mean(states: Tensor, inputs: Inputs) -> Tensor:
    """Return the mean over tokens that are not padding: (rows, tokens, hidden) → (rows, hidden)."""
    mask = _mask(inputs).unsqueeze(-1).to(states.dtype)
    return (states * mask).sum(1) / mask.sum(1)


def last(states: Tensor, inputs: Inputs) -> Tensor:
    """Return the state of the last token that is not padding: (rows, tokens, hidden) → (rows, hidden).

    In a causal model no other state depends on the whole text.
    """
    mask = _mask(inputs)
    positions = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
    return states[torch.arange(len(states), device=states.device), positions]


def _mask(inputs: Inputs) -> Tensor:
    """Return the mask of the states, shape (rows, tokens); that of the decoder if the inputs have decoder tokens."""
    return inputs["decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask"]


POOLINGS: dict[str, Pooling] = {"first": first, "mean": mean, "last": last}


HeadReading = Callable[[Tensor, Inputs, ForwardPlan], Tensor]
"""As a `Pooling`, provided by a head; it is also given the plan under which the states were computed."""
