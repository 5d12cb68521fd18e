"""What stands for a head over the vocabulary where there is neither tokenizer nor weights."""

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
"""Heads that are the pretrained model's own vocabulary head, frozen: they add no parameters."""

STATES = "states"
"""The reading of all states, shape (rows, tokens, hidden)."""


def states(found: Tensor, _: object) -> Tensor:
    """The reading `STATES`."""
    return found


class FrozenVocabulary(Head):
    """No tensors of its own. `verbalizer` scores one word per label at one place, `lm` all words at every place.

    Counted is the projection to words alone, not what some families have before it.
    """

    name = "vocabulary"

    def __init__(self, backbone: Backbone, stands_for: str) -> None:
        self.stands_for = stands_for
        self._words = backbone.word_embeddings

    @classmethod
    def make(cls, config: HeadConfig) -> Self:
        """No configuration makes it: it stands for the configured head."""
        raise NotImplementedError

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Head.init`."""
        return {}

    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """See `Head.logits`; `lm` gives the mean over places, which costs a training step the same."""
        if self.stands_for == "verbalizer":
            return nn.functional.linear(view["first"], self._words[: len(task.labels)])
        return nn.functional.linear(view[STATES], self._words).mean(1)
