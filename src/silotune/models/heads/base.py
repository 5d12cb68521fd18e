"""Define the interface of heads: tokenize a task's rows, create tensors, compute logits and loss from a view.

Each task has its own head; one part may hold the heads of many tasks.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from silotune.config.train import ClassWeights
from silotune.core.tensors import Tensors
from silotune.data.batching import Batch
from silotune.data.long_texts import CUT, LongTexts
from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.data.tokenized import RowTokenizer, TokenizedRows
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.stored_model import ModelClass
from silotune.models.forward.views import HeadReading, View

if TYPE_CHECKING:
    from silotune.config.head import HeadConfig

Pooling = Literal["first", "mean", "last"]

TokenizeRows = Callable[[Task, Sequence[Row]], TokenizedRows]
"""A head's function (task, its rows) → token ids, with the positions that the head reads."""


@dataclass(frozen=True)
class LossRecipe:
    """Label smoothing and class weights of the training loss; predictions and scores do not use them.

    Args:
        label_smoothing: the share of the true label's probability that is spread evenly over all labels.
        class_weights: label → weight, 1 where none is named; or `balanced`, by the labels' numbers of training rows.
    """

    label_smoothing: float = 0.0
    class_weights: ClassWeights = "none"

    @property
    def plain(self) -> bool:
        """Whether the loss is the head's own."""
        return not self.label_smoothing and self.class_weights == "none"

    @property
    def key(self) -> str:
        """The configuration key that changes the loss, for messages."""
        return "train.label_smoothing" if self.label_smoothing else "train.class_weights"

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the loss of a batch's logits, shape (): the mean over rows, weighted by their labels' weights.

        Logits have shape (rows, outputs).
        """
        if not batch.task.rules.one_label:  # `check_tasks` has refused all but the plain recipe
            return task_loss(logits, batch)
        weights = self._weights(batch)
        return nn.functional.cross_entropy(
            logits,
            batch.labels.to(logits.device),
            weight=None if weights is None else weights.to(logits),
            label_smoothing=self.label_smoothing,
        )

    def _weights(self, batch: Batch) -> Tensor | None:
        """Return the weight of each class, shape (classes,); None if all weigh the same."""
        names = batch.task.labels
        if isinstance(self.class_weights, Mapping):
            return torch.tensor([self.class_weights.get(name, 1.0) for name in names])
        if self.class_weights == "none":
            return None
        labels = batch.labels if batch.source is None else batch.source.labels
        counts = torch.bincount(labels, minlength=len(names))
        balanced = len(labels) / (int((counts > 0).sum()) * counts.clamp(min=1))
        return torch.where(counts > 0, balanced, torch.ones_like(balanced))  # a label without rows is only smoothed to


def task_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return the plain loss of a batch's logits, shape (rows, outputs), by the kind of its task: `Kind.loss`."""
    loss: Tensor = batch.task.rules.loss(logits, batch.labels.to(logits.device))
    return loss


PLAIN = LossRecipe()
"""The recipe that leaves a head's loss unchanged."""


class Head(ABC):
    """Computes a task's logits and loss from the backbone's states. Names of its tensors begin with the task's name.

    A head of one linear layer over the mean of the states::

        @register_head
        class MeanHead(Head):
            name = "mean-linear"

            def init(self, backbone, tasks, generator):
                return {f"{task.name}.w": torch.zeros(task.outputs, backbone.hidden_size) for task in tasks}

            def logits(self, tensors, view, task):
                return view["mean"] @ tensors[f"{task.name}.w"].T
    """

    name: ClassVar[str]
    task_kind: ClassVar[str] = "classification"
    """The kind of task it answers; see `answers`."""
    model_class: ClassVar[ModelClass] = "AutoModel"
    """The class of transformers with which the backbone is loaded."""
    has_tensors: ClassVar[bool] = True
    """Whether the head has tensors to train. A head without tensors serves several tasks even if it is shared."""

    reads_reference: ClassVar[bool] = False
    """Whether its loss also reads the backbone without any part; `referenced_loss` is then its loss."""

    forwards_again: bool = False
    """Whether its reading runs the backbone again, so that silos cannot share a forward."""
    soft_slot: bool = False
    """Whether the head sets the position of the soft prompt in a row's text."""
    by_position: ClassVar[bool] = False
    """Whether its reading and outputs lie flat: one for each position of `TokenizedRows.reads`, row after row."""
    couples_rows: bool = False
    """Whether its loss of a row depends on the other rows of the batch, as with in-batch negatives."""
    reads_windows: ClassVar[bool] = False
    """Whether it can read rows in windows: its tokenizer makes them, and its outputs of a row are the windows' mean."""
    long_texts: LongTexts = CUT
    """What becomes of texts that do not fit (`data.long_texts`)."""
    pooling: Pooling = "first"
    """How a classifier pools the last layer's states: the first token's, the last one's, or the mean."""

    @classmethod
    def answers(cls, kind: str) -> bool:
        """Return whether the head answers tasks of this kind."""
        return kind == cls.task_kind

    @classmethod
    def make(cls, config: HeadConfig) -> Head:
        """Create the head that a configuration describes."""
        return cls()

    def with_long_texts(self, long: LongTexts) -> Self:
        """Return the same head for texts of which this becomes."""
        head = copy.copy(self)
        head.long_texts = long
        return head

    def check(self, backbone: Backbone, tasks: Iterable[Task]) -> None:  # noqa: B027  (nothing to check is usual)
        """Check before training that the head works with this backbone."""

    def check_names(self, tasks: Iterable[Task]) -> None:  # noqa: B027  (few name tasks or labels)
        """Check that options name existing tasks and labels."""

    def row_tokenizer(self, backbone: Backbone, max_length: int) -> TokenizeRows:
        """Make the function that tokenizes rows, to at most `max_length` tokens each."""
        segments = getattr(backbone.base.config, "type_vocab_size", 0)
        return RowTokenizer(backbone.tokenizer, max_length, segments, self.long_texts)

    @abstractmethod
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Create the tensors of one head per task, float32, on the CPU."""

    def reading(self, backbone: Backbone, task: Task) -> HeadReading | None:
        """Return a function that maps the last layer's states to this head's entry of a view, `view[head.name]`.

        Returns:
            The function; None if the head reads pooled states (`view["first"]`, `view["mean"]`).
        """
        return None

    def smoothed_reading(self, backbone: Backbone, task: Task, smoothing: float) -> HeadReading | None:
        """Return the reading for training with label smoothing; it differs from `reading` if the reading is a loss."""
        return self.reading(backbone, task)

    @abstractmethod
    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """Compute outputs, shape (rows, outputs): the logits of classes or labels, or the predicted number."""

    def cross_entropy(self, tensors: Tensors, view: View, batch: Batch) -> Tensor:
        """Compute a batch's loss, a scalar: the mean over its rows; see `task_loss`."""
        return task_loss(self.logits(tensors, view, batch.task), batch)

    def training_loss(self, tensors: Tensors, view: View, batch: Batch, recipe: LossRecipe) -> Tensor:
        """Compute the loss of training, a scalar: `cross_entropy` with label smoothing and class weights, if set."""
        if recipe.plain:
            return self.cross_entropy(tensors, view, batch)
        return recipe.cross_entropy(self.logits(tensors, view, batch.task), batch)

    def check_loss(self, recipe: LossRecipe) -> None:
        """Refuse label smoothing or class weights, before training, if the head's loss has none."""
        own = type(self).cross_entropy is not Head.cross_entropy
        if not recipe.plain and own and type(self).training_loss is Head.training_loss:
            raise InputError(f"{recipe.key}: head={self.name} has a loss of its own; leave it out")

    def referenced_loss(self, tensors: Tensors, view: View, reference: View, batch: Batch) -> Tensor:
        """Compute the loss of a head that `reads_reference`, shape ().

        The reference is the batch under the empty mix, without gradient.
        """
        raise NotImplementedError(f"head {self.name} reads no reference")

    def loss_units(self, batch: Batch) -> int | None:
        """Return the number of terms over which `cross_entropy` is a mean, each of which depends on one row alone.

        Returns:
            The number, by default of rows; None if a head with a `cross_entropy` of its own does not say.
        """
        own = type(self).cross_entropy is not Head.cross_entropy
        return None if own or self.couples_rows else len(batch)

    def description(self, config: HeadConfig, task: Task) -> dict[str, Any]:
        """Return the fields of an export's `head.json` that describe how this head answers (docs/export.md)."""
        return {"options": config.model_dump(mode="json", exclude={"name", "scope"}, exclude_defaults=True)}


def head_readings(heads: Sequence[Head], backbone: Backbone, smoothing: float, task: Task) -> dict[str, HeadReading]:
    """Return the `smoothed_reading` of each head that reads states, by the head's name, for one task."""
    readings = {head.name: head.smoothed_reading(backbone, task, smoothing) for head in heads}
    return {name: reading for name, reading in readings.items() if reading is not None}
