"""Make one group of a tuner's tensors, such as LoRA's A, a separate part with its own scope."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from silotune.core.tensors import Tensors
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.base import Tuner


@dataclass(frozen=True)
class TensorGroup:
    """Some of a tuner's tensors. Parts that hold all of its groups are one adapter in a mix (`joined`).

    Args:
        tuner: the tuner whose tensors they are.
        group: a key of `Tuner.groups`.
    """

    tuner: Tuner
    group: str

    def __post_init__(self) -> None:
        """Refuse a group that the tuner does not have."""
        groups = self.tuner.groups
        if self.group not in groups:
            allowed = f"its groups are {', '.join(groups)}" if groups else "its tensors are one group"
            raise InputError(f"tuner {self.tuner.name}: has no group of tensors {self.group!r}; {allowed}")

    @property
    def name(self) -> str:
        """See `methods.parts.Module`."""
        return f"{self.tuner.name} {self.group}"

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Return the group's tensors before training, as the tuner draws them."""
        return self.select(self.tuner.init(backbone, tasks, generator))

    def select(self, tensors: Tensors) -> Tensors:
        """Select the group's tensors from all tensors of the tuner."""
        endings = tuple(f".{name}" for name in self.tuner.groups[self.group])
        return {name: tensor for name, tensor in tensors.items() if name.endswith(endings)}


def tuner_of(module: object) -> Tuner | None:
    """Return the tuner of a part's module: the module itself, or the group's tuner; None for heads and others."""
    if isinstance(module, TensorGroup):
        return module.tuner
    return module if isinstance(module, Tuner) else None
