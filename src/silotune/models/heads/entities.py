"""Tag the words of a text by one linear layer over the state of each word's first token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from silotune.config.head import HeadConfig
from silotune.core.tensors import Tensors, draw_linear
from silotune.data.entity_tokenizer import EntityTokenizer
from silotune.data.tasks import Task
from silotune.data.tokenized import READ_POSITIONS, READ_ROWS, Inputs
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.forward.views import HeadReading, View
from silotune.models.heads.base import Head, TokenizeRows
from silotune.models.heads.classifier import apply_linear


class EntitiesHead(Head):
    """Marks spans; `<task>.out` has the shape (tags, hidden), with a bias. Contrasts of methods read the mean state."""

    name = "entities"
    task_kind = "entities"
    by_position = True
    reads_windows = True
    pooling = "mean"

    @override
    def check(self, backbone: Backbone, tasks: Iterable[Task]) -> None:
        """Refuse tokenizers that do not say where tokens stand, and encoder–decoders."""
        if not backbone.tokenizer.is_fast:
            kind = type(backbone.tokenizer).__name__
            raise InputError(
                f"head=entities: the tokenizer of {backbone.name!r} ({kind}) does not say where its tokens stand in a "
                "text; allowed: backbones with a fast tokenizer"
            )
        if backbone.base.config.is_encoder_decoder:
            raise InputError(f"head=entities: {backbone.name!r} is an encoder–decoder; allowed: encoders and decoders")

    @override
    def row_tokenizer(self, backbone: Backbone, max_length: int) -> TokenizeRows:
        """Return an `EntityTokenizer`."""
        return EntityTokenizer(backbone.tokenizer, max_length, self.long_texts)

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        tensors: Tensors = {}
        for task in tasks:
            tensors |= draw_linear(f"{task.name}.out", task.outputs, backbone.hidden_size, generator)
        return tensors

    @override
    def description(self, config: HeadConfig, task: Task) -> dict[str, Any]:
        return {
            "tags": ["O", *(f"{letter}-{label}" for label in task.labels for letter in "BI")],
            "computes": "logits of a token's tags = out.weight · x + out.bias, where x is its last layer's state; a "
            "word has the tag of its first token",
        }

    @override
    def reading(self, backbone: Backbone, task: Task) -> HeadReading:
        """Read the state of each word's first token, flat, shape (words, hidden)."""

        def read(states: Tensor, inputs: Inputs, plan: ForwardPlan) -> Tensor:
            return states[inputs[READ_ROWS], inputs[READ_POSITIONS]]

        return read

    @override
    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """Compute the logits of words' tags, flat, shape (words, tags)."""
        return apply_linear(tensors, f"{task.name}.out", view[self.name])
