"""LoRA: a low-rank update of linear layers (Hu et al. 2022): `W·x + (alpha / r)·B·A·x`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from silotune.architectures import SITE_FIELDS
from silotune.backbone import Backbone, OutputChange, Plan
from silotune.parts import Tensors
from silotune.tuners.base import Tuner, TunerOptions, Weighted, scale, total

if TYPE_CHECKING:
    from silotune.data.tasks import Task


class LoRAOptions(TunerOptions):
    """`r`: the rank. `alpha`: the scale is alpha / r. `sites`: which linear layers of each block."""

    r: int = Field(8, ge=1)
    alpha: float = Field(16, gt=0)
    sites: tuple[str, ...] = ("query", "value")

    @field_validator("sites", mode="before")
    @classmethod
    def _known(cls, sites: object) -> object:
        chosen = tuple(sites.split(",")) if isinstance(sites, str) else tuple(cast("Iterable[str]", sites))
        for site in chosen:
            if site not in SITE_FIELDS:
                raise ValueError(f"unknown site {site!r}; allowed: {', '.join(SITE_FIELDS)}")
        return chosen


class LoRA(Tuner):
    """Adds `(alpha / r)·B·A·x` to a linear layer's output; per site `A` (r, in) and `B` (out, r), B starts at zero."""

    name = "lora"
    Options = LoRAOptions

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Tuner.init`; A is uniform in ±1/√in, as in the authors' code and in peft."""
        tensors: Tensors = {}
        for site in self._sites(backbone):
            linear = cast(nn.Linear, backbone.site(site))
            bound = 1 / math.sqrt(linear.in_features)
            uniform = torch.rand(self._options.r, linear.in_features, generator=generator)
            tensors[f"{site}.A"] = (2 * uniform - 1) * bound
            tensors[f"{site}.B"] = torch.zeros(linear.out_features, self._options.r)
        return tensors

    def act(self, backbone: Backbone, mix: Sequence[Weighted], plan: Plan) -> None:
        """See `Tuner.act`: the weighted sum of the parts' updates is added."""
        factor = self._options.alpha / self._options.r
        for site in self._sites(backbone):
            plan.outputs[site].append(
                _added([(part.tensors[f"{site}.A"], part.tensors[f"{site}.B"], part.weight) for part in mix], factor)
            )

    @property
    def _options(self) -> LoRAOptions:
        return cast(LoRAOptions, self.options)

    def _sites(self, backbone: Backbone) -> list[str]:
        fields = self._options.sites
        return [backbone.architecture.module(field, block) for block in range(backbone.blocks) for field in fields]


def _added(updates: list[tuple[Tensor, Tensor, float | Tensor]], factor: float) -> OutputChange:
    def change(x: Tensor, y: Tensor) -> Tensor:
        outputs = []
        for a, b, weight in updates:
            low = nn.functional.linear(x, a)
            outputs.append(scale(nn.functional.linear(low, b), weight * factor))
        return y + total(outputs)

    return change
