"""A plan: what one forward adds to or replaces in the backbone. Tuners write it, `Backbone.encode` runs it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from silotune.models.backbone.shared_activations import SharedActivations
from silotune.models.backbone.virtual_tokens import Prefix, Prompt

OutputChange = Callable[[Tensor, Tensor], Tensor]
"""(a site's input, its output so far) → its output."""

InputChange = Callable[[Tensor], Tensor]
"""A site's input → what it gets instead."""


@dataclass
class ForwardPlan:
    """What one forward changes in the backbone.

    `outputs` maps a module's name to changes of its output, applied in order, `inputs` to changes of its input.
    `prompts` and `prefixes` are virtual tokens before the text, in order. `weights` maps a parameter's name to the
    tensor used instead. `dropout` runs the model in training mode. `past` is filled by the backbone itself: the
    prefixes of attention modules that are reached one by one. `rows` and `copies` are those of a plan for several
    views (`silotune.stacking`), `below` is what its forward has in common with others over the same rows.
    """

    outputs: defaultdict[str, list[OutputChange]] = field(default_factory=lambda: defaultdict(list))
    inputs: defaultdict[str, list[InputChange]] = field(default_factory=lambda: defaultdict(list))
    prompts: list[Prompt] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    past: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    dropout: bool = False
    rows: int = 0
    copies: int = 1
    below: SharedActivations | None = None

    @property
    def by_row(self) -> bool:
        """Whether it only changes modules' inputs and outputs, row by row."""
        return not (self.prompts or self.prefixes or self.weights or self.dropout)
