"""Learn how strongly each adapter of a mix acts on a token, at every target module (FedALT)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from silotune.core.tensors import State, Tensors
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.base import Tuner
from silotune.models.tuners.target_modules import layer_widths
from silotune.models.tuners.token_weight import TokenWeight


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
