"""Heads of trained layers over one vector per row, and the projection of contrastive losses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors, draw_linear
from silotune.data.kinds import KINDS
from silotune.data.tasks import Task
from silotune.data.tokenized import Inputs
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.stored_model import is_causal
from silotune.models.forward.views import POOLINGS, HeadReading, View, by_windows
from silotune.models.heads.base import Head, Pooling

if TYPE_CHECKING:
    from silotune.config.head import HeadConfig


POOLED: dict[str, str] = {
    "first": "the text's first token",
    "mean": "the mean over the text's tokens",
    "last": "the text's last token",
}
"""Pooling → what it reads, in words."""


class Classifier(Head):
    """Classifies by trained layers over one state per row: a token's, or the mean over all tokens."""

    reads_windows = True
    formula: ClassVar[str]
    """Logits from x, in the words of `head.json`."""

    def __init__(self, pooling: Pooling = "first", normalize: float | None = None) -> None:
        self.pooling = pooling
        self.normalize = normalize

    @classmethod
    @override
    def answers(cls, kind: str) -> bool:
        """Return whether the head answers a kind of task: every kind whose rows have one answer as a whole."""
        return KINDS[kind].labeled and not KINDS[kind].by_position

    @classmethod
    @override
    def make(cls, config: HeadConfig) -> Self:
        # older model.json leave `first` out
        return cls("first" if config.pooling == "auto" else config.pooling, config.normalize)

    @override
    def reading(self, backbone: Backbone, task: Task) -> HeadReading | None:
        """Return what reads rows in windows: each window's vector, and behind it its share in the row's mean."""
        pool = POOLINGS[self.pooling]

        def read(states: Tensor, inputs: Inputs, plan: ForwardPlan) -> Tensor:
            vectors, shares = by_windows(pool(states, inputs), inputs)
            return torch.cat([vectors, shares.unsqueeze(-1)], -1)

        return read if self.long_texts.in_windows else None

    @override
    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """Compute outputs, shape (rows, outputs): of rows in windows the mean over those of its windows."""
        if not self.long_texts.in_windows:
            return self.layers(tensors, self._scaled(view[self.pooling]), task)
        x, shares = view[self.name][..., :-1], view[self.name][..., -1:]
        return (shares * self.layers(tensors, self._scaled(x), task)).sum(1)

    @abstractmethod
    def layers(self, tensors: Tensors, x: Tensor, task: Task) -> Tensor:
        """Compute outputs, shape (…, outputs), of vectors, shape (…, hidden)."""

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.normalize is None else self.normalize * nn.functional.normalize(x, dim=-1)

    @override
    def check(self, backbone: Backbone, tasks: Iterable[Task]) -> None:
        """Refuse the first token of a causal model, which has seen nothing of the text."""
        if self.pooling == "first" and is_causal(backbone.base.config):
            raise InputError(
                f"head.pooling=first: the first token of {backbone.name!r} has seen no other, as the model is causal; "
                "allowed: last, mean"
            )

    @override
    def description(self, config: HeadConfig, task: Task) -> dict[str, Any]:
        x = POOLED[self.pooling].removeprefix("the " if self.pooling == "mean" else "")
        scaled = "" if self.normalize is None else f", scaled to an L2 norm of {self.normalize:g}"
        return {
            "pooling": self.pooling,
            "normalize": self.normalize,
            "computes": f"logits = {self.formula}, where x is the last layer's state: {x}, virtual tokens left out"
            f"{scaled}",
        }


class MLPHead(Classifier):
    """Two linear layers with tanh between them, as RoBERTa's classifier (FedMCP, section IV-B).

    Each task has `<task>.dense` (hidden, hidden) and `<task>.out` (outputs, hidden), with biases.
    """

    name = "mlp"
    formula = "out.weight · tanh(dense.weight · x + dense.bias) + out.bias"

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        width = backbone.hidden_size
        tensors: Tensors = {}
        for task in tasks:
            tensors |= draw_linear(f"{task.name}.dense", width, width, generator)
            tensors |= draw_linear(f"{task.name}.out", task.outputs, width, generator)
        return tensors

    @override
    def layers(self, tensors: Tensors, x: Tensor, task: Task) -> Tensor:
        hidden = torch.tanh(apply_linear(tensors, f"{task.name}.dense", x))
        return apply_linear(tensors, f"{task.name}.out", hidden)


def draw_outputs(backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
    """Draw a linear layer over the backbone's vectors for each task, `<task>.out`."""
    tensors: Tensors = {}
    for task in tasks:
        tensors |= draw_linear(f"{task.name}.out", task.outputs, backbone.hidden_size, generator)
    return tensors


class LinearHead(Classifier):
    """One linear layer with bias (the PEFT-in-FL setting), `<task>.out` of shape (outputs, hidden)."""

    name = "linear"
    formula = "out.weight · x + out.bias"

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        return draw_outputs(backbone, tasks, generator)

    @override
    def layers(self, tensors: Tensors, x: Tensor, task: Task) -> Tensor:
        return apply_linear(tensors, f"{task.name}.out", x)


class Projection:
    """One linear layer for contrastive losses (FedFAME: width 256). It gives no answers and is no `Head`."""

    name = "projection"

    def __init__(self, width: int = 256, pooling: Pooling = "first") -> None:
        self.width = width
        self.pooling = pooling

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Draw one layer for all tasks."""
        return draw_linear("projection", self.width, backbone.hidden_size, generator)

    def __call__(self, tensors: Tensors, view: View) -> Tensor:
        """Project the view's pooled states: (rows, hidden) → (rows, width)."""
        return apply_linear(tensors, "projection", view[self.pooling])


def apply_linear(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    """Apply the linear layer `name` to x of shape (rows, columns)."""
    return nn.functional.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
