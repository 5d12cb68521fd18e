"""Stand in for the heads `verbalizer` and `lm` in cost estimates, which have no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.models.forward.views import View
from silotune.models.heads import Head

if TYPE_CHECKING:
    from silotune.config.head import HeadConfig
    from silotune.data.tasks import Task
    from silotune.models.backbone.backbone import Backbone


LANGUAGE_MODEL_HEADS = ("verbalizer", "lm")
"""Heads that use the pretrained model's own frozen output layer; they add no parameters."""

STATES = "states"
"""Name of the view entry with all states, shape (rows, tokens, hidden)."""


def all_states(last_layer: Tensor, _: object) -> Tensor:
    """Pooling function of `STATES`: returns the last layer's states as they are."""
    return last_layer


class VocabularyHeadStub(Head):
    """A head without tensors that costs as much as the configured head.

    In place of `verbalizer` it scores one word per label at one position, in place of `lm` all words at all positions.
    Its cost is that of the projection to words; the layers that some families have before the projection are left out.

    Args:
        backbone: a backbone of fake tensors.
        replaced: the name of the head that it replaces, one of `LANGUAGE_MODEL_HEADS`.
    """

    name = "vocabulary-stub"

    def __init__(self, backbone: Backbone, replaced: str) -> None:
        self.replaced = replaced
        self._words = backbone.word_embeddings

    @classmethod
    def make(cls, config: HeadConfig) -> Self:
        """Refuse: no configuration can name this head."""
        raise NotImplementedError

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        return {}

    @override
    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """For `lm` the mean over positions, as costly as a loss at each position."""
        if self.replaced == "verbalizer":
            return nn.functional.linear(view["first"], self._words[: len(task.labels)])
        return nn.functional.linear(view[STATES], self._words).mean(1)
