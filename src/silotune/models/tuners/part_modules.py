"""What a part may hold beside a whole tuner: one group of its tensors, or a mixer that weighs tokens (FedALT)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from silotune.core.tensors import State, Tensors
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.base import TokenWeight, Tuner
from silotune.models.tuners.target_modules import layer_widths


@dataclass(frozen=True)
class TensorGroup:
    """Some of a tuner's tensors. Parts that hold all of its groups are one adapter in a mix (`joined`).

    The group is a key of `Tuner.groups`.
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


@dataclass(frozen=True)
class TokenMixer:
    """Matrices G of shape (parts, in), one for each target module of a tuner; at zero all parts weigh alike.

    Args:
        tuner: the tuner of the mixed parts; it must support weights per token (`weighs_tokens`).
        parts: how many adapters a mix has.
    """

    tuner: Tuner
    parts: int = 2
    name: ClassVar[str] = "mixer"

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Return the matrices; see `methods.parts.Module.init`."""
        modules = self.tuner.target_modules(self.tuner.init(backbone, tasks, generator))
        if not backbone.experts.isdisjoint(modules):
            raise InputError(
                "tuner.sites: a mixer weighs each token, and experts' adapters cannot be; allowed: query, key, value, "
                "attention_output"
            )
        widths = {module: layer_widths(backbone.module(module))[0] for module in modules}
        return {f"{module}.mixer.weight": torch.zeros(self.parts, width) for module, width in widths.items()}


def token_weight(mixer: str, index: int) -> Callable[[State], TokenWeight]:
    """Return a learned weight of a mix: the `index`-th one of the part `mixer`."""
    return lambda state: TokenWeight(state[mixer], index)
