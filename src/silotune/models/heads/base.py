"""What a head is: from a view's readings to a task's logits and loss. Heads belong to tasks; a part may hold many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from silotune.core.tensors import Tensors
from silotune.data.batching import Batch
from silotune.data.tasks import Row, Task, TaskKind
from silotune.data.tokenized import RowTokenizer, TokenizedRows
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import ModelClass
from silotune.models.forward.pooling import HeadReading
from silotune.models.forward.views import View

if TYPE_CHECKING:
    from silotune.config.head import HeadConfig


Pooling = Literal["first", "mean"]

Tokenize = Callable[[Task, Sequence[Row]], TokenizedRows]
"""(task, its rows) → token ids, as the head wants them."""


class Head(ABC):
    """What turns a view into answers. Tensor names, where there are any, begin with the task's name."""

    name: ClassVar[str]
    task_kind: ClassVar[TaskKind] = "classification"
    """The kind of task it is for."""
    model_class: ClassVar[ModelClass] = "AutoModel"
    """How the backbone has to be loaded."""
    has_tensors: ClassVar[bool] = True
    """Whether there is anything to train; a head without tensors serves several tasks even where it is shared."""

    soft_slot: bool = False
    """Whether it says where in a row's text the soft prompt goes."""
    pooling: Pooling = "first"
    """Which state a classifier stands on."""

    @classmethod
    def make(cls, config: HeadConfig) -> Head:
        """The head of a configuration.

        Raises:
            InputError: for options it cannot work with.
        """
        return cls()

    def check(self, backbone: Backbone, tasks: Iterable[Task]) -> None:  # noqa: B027  (nothing to check is usual)
        """Refuse what cannot work over this backbone, before any training.

        Raises:
            InputError: with the option to change.
        """

    def check_names(self, tasks: Iterable[Task]) -> None:  # noqa: B027  (few name tasks or labels)
        """Refuse options for tasks or labels that are not there.

        Args:
            tasks: all of the run, the absent ones too.

        Raises:
            InputError: naming the option.
        """

    def row_tokenizer(self, backbone: Backbone, max_length: int) -> Tokenize:
        """How rows become token ids; `max_length` tokens at most."""
        return RowTokenizer(backbone.tokenizer, max_length)

    @abstractmethod
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """The tensors of one head per task, float32."""

    def reading(self, backbone: Backbone, task: Task) -> HeadReading | None:
        """What it reads off the last layer's states, to be found in views under its name; None: a pooled reading."""
        return None

    @abstractmethod
    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """Shape (rows, classes)."""

    def cross_entropy(self, tensors: Tensors, view: View, batch: Batch) -> Tensor:
        """The loss of a batch (scalar): the mean over its rows' labels."""
        logits = self.logits(tensors, view, batch.task)
        return nn.functional.cross_entropy(logits, batch.labels.to(logits.device))
