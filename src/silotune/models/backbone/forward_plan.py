"""Describe how a forward of the backbone is changed; tuners write it, and `Backbone.encode` applies it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from silotune.config.train import Dropout
from silotune.models.backbone.shared_activations import SharedActivations
from silotune.models.backbone.virtual_tokens import Prefix, Prompt

OutputChange = Callable[[Tensor, Tensor], Tensor]
"""(a module's input, its output so far) → its new output; each of shape (rows, tokens, width).

The output so far holds the module's bias and the changes that come earlier in the plan, also those of other parts.
"""

InputChange = Callable[[Tensor], Tensor]
"""A module's input, shape (rows, tokens, width) → its new input, same shape."""


@dataclass
class ForwardPlan:
    """The changes of one forward: of modules' inputs and outputs, virtual tokens, replaced weights, dropout.

    Args:
        outputs: module's name → changes of its output, applied in order.
        inputs: module's name → changes of its input, applied in order.
        prompts: virtual tokens before the text, in order.
        prefixes: keys and values before the text's own, in order.
        past: module's name → its past keys and values, in models whose attention modules are given a prefix one by
            one; filled in by the backbone.
        weights: parameter's name → the tensor used instead.
        dropout: whether the model runs in training mode.
        dropout_rate: the rate of its dropout there; None: each place's own.
        rows: rows of the batch, in a plan for several views (see `stacking`).
        replicas: how many views the plan is for; each has a replica of the rows.
        shared: activations shared with other forwards over the same rows; None: none are.
    """

    outputs: defaultdict[str, list[OutputChange]] = field(default_factory=lambda: defaultdict(list))
    inputs: defaultdict[str, list[InputChange]] = field(default_factory=lambda: defaultdict(list))
    prompts: list[Prompt] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    past: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    dropout: bool = False
    dropout_rate: float | None = None
    rows: int = 0
    replicas: int = 1
    shared: SharedActivations | None = None

    def with_dropout(self, dropout: Dropout) -> ForwardPlan:
        """Return the plan with dropout at the backbone's `own` rates or at one rate; with None, the plan itself."""
        if dropout is None:
            return self
        return replace(self, dropout=bool(dropout), dropout_rate=None if isinstance(dropout, str) else dropout)

    @property
    def by_row(self) -> bool:
        """Whether the plan only changes modules' inputs and outputs, row by row."""
        return not (self.prompts or self.prefixes or self.weights or self.dropout)
