"""A stub that replaces heads over the vocabulary in cost estimates, where there is no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

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


def states(last_layer: Tensor, _: object) -> Tensor:
    """Pooling function of `STATES`: returns the last layer's states as they are."""
    return last_layer


class FrozenVocabulary(Head):
    """Has no tensors. As `verbalizer` it scores one word per label at one position, as `lm` all words at all positions.

    The count holds the projection to words, not the layers that some families have before it.

    Args:
        backbone: over fake tensors.
        stands_for: name of the replaced head.
    """

    name = "vocabulary"

    def __init__(self, backbone: Backbone, stands_for: str) -> None:
        self.stands_for = stands_for
        self._words = backbone.word_embeddings

    @classmethod
    def make(cls, config: HeadConfig) -> Self:
        """Refuse, since `FrozenVocabulary` replaces a configured head and is none itself."""
        raise NotImplementedError

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Head.init`."""
        return {}

    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """See `Head.logits`; `lm` gives the mean over positions, which costs a training step the same."""
        if self.stands_for == "verbalizer":
            return nn.functional.linear(view["first"], self._words[: len(task.labels)])
        return nn.functional.linear(view[STATES], self._words).mean(1)
