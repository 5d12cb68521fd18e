"""Heads: from a view's reading to a task's logits. Heads belong to tasks; a part may hold one per task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from silotune.parts import Tensors
from silotune.views import View

if TYPE_CHECKING:
    from silotune.backbone import Backbone
    from silotune.data.tasks import Task

Pooling = Literal["first", "mean"]


class Head(ABC):
    """A classifier over a pooled reading. Tensor names begin with the task's name."""

    name: ClassVar[str]

    def __init__(self, pooling: Pooling = "first") -> None:
        self.pooling = pooling

    @abstractmethod
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """The tensors of one head per task, float32."""

    @abstractmethod
    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """Shape (rows, classes)."""


class MLPHead(Head):
    """hidden → hidden → classes with tanh between, as RoBERTa's classifier (FedMCP, section IV-B)."""

    name = "mlp"

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Head.init`."""
        width = backbone.hidden_size
        tensors: Tensors = {}
        for task in tasks:
            tensors |= _linear(f"{task.name}.dense", width, width, generator)
            tensors |= _linear(f"{task.name}.out", len(task.labels), width, generator)
        return tensors

    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """See `Head.logits`."""
        hidden = torch.tanh(_apply(tensors, f"{task.name}.dense", view[self.pooling]))
        return _apply(tensors, f"{task.name}.out", hidden)


class LinearHead(Head):
    """hidden → classes: one linear layer (the PEFT-in-FL setting)."""

    name = "linear"

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Head.init`."""
        tensors: Tensors = {}
        for task in tasks:
            tensors |= _linear(f"{task.name}.out", len(task.labels), backbone.hidden_size, generator)
        return tensors

    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """See `Head.logits`."""
        return _apply(tensors, f"{task.name}.out", view[self.pooling])


HEADS: dict[str, type[Head]] = {head.name: head for head in (MLPHead, LinearHead)}


def _linear(name: str, rows: int, columns: int, generator: torch.Generator) -> Tensors:
    """A linear layer drawn as PyTorch draws one: uniform in ±1/√columns."""
    bound = 1 / math.sqrt(columns)

    def uniform(*shape: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=generator) - 1) * bound

    return {f"{name}.weight": uniform(rows, columns), f"{name}.bias": uniform(rows)}


def _apply(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return nn.functional.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
