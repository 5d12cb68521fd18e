"""Classifiers of their own on top of a pooled state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from silotune.core.tensors import Tensors
from silotune.data.tasks import Task
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.views import View
from silotune.models.heads.base import Head, Pooling
from silotune.models.initializers import draw_linear

if TYPE_CHECKING:
    from silotune.config.head import HeadConfig


class Classifier(Head):
    """A classifier over a pooled reading."""

    def __init__(self, pooling: Pooling = "first") -> None:
        self.pooling = pooling

    @classmethod
    def make(cls, config: HeadConfig) -> Self:
        """See `Head.make`."""
        return cls(config.pooling)


class MLPHead(Classifier):
    """hidden → hidden → classes with tanh between, as RoBERTa's classifier (FedMCP, section IV-B)."""

    name = "mlp"

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Head.init`."""
        width = backbone.hidden_size
        tensors: Tensors = {}
        for task in tasks:
            tensors |= draw_linear(f"{task.name}.dense", width, width, generator)
            tensors |= draw_linear(f"{task.name}.out", len(task.labels), width, generator)
        return tensors

    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """See `Head.logits`."""
        hidden = torch.tanh(apply_linear(tensors, f"{task.name}.dense", view[self.pooling]))
        return apply_linear(tensors, f"{task.name}.out", hidden)


class LinearHead(Classifier):
    """hidden → classes: one linear layer (the PEFT-in-FL setting)."""

    name = "linear"

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Head.init`."""
        tensors: Tensors = {}
        for task in tasks:
            tensors |= draw_linear(f"{task.name}.out", len(task.labels), backbone.hidden_size, generator)
        return tensors

    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """See `Head.logits`."""
        return apply_linear(tensors, f"{task.name}.out", view[self.pooling])


def apply_linear(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    """The linear layer `name` on x of shape (rows, columns)."""
    return nn.functional.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
