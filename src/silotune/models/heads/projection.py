"""`Projection`: a linear layer for contrastive losses (FedFAME); a part's module, but no `Head`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from silotune.core.tensors import Tensors
from silotune.models.forward.views import View
from silotune.models.heads.base import Pooling
from silotune.models.heads.classifier import apply_linear
from silotune.models.initializers import draw_linear

if TYPE_CHECKING:
    from silotune.data.tasks import Task
    from silotune.models.backbone.backbone import Backbone


class Projection:
    """hidden → `width`: one linear layer (FedFAME: 256). It gives no answers and is no `Head`."""

    name = "projection"

    def __init__(self, width: int = 256, pooling: Pooling = "first") -> None:
        self.width = width
        self.pooling = pooling

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Module.init`; one layer for all tasks."""
        return draw_linear("projection", self.width, backbone.hidden_size, generator)

    def __call__(self, tensors: Tensors, view: View) -> Tensor:
        """Project the view's pooled states: (rows, hidden) → (rows, width)."""
        return apply_linear(tensors, "projection", view[self.pooling])
