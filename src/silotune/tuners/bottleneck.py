"""Bottleneck adapters: two linear layers with a non-linearity behind a sublayer.

Houlsby et al. 2019 (behind attention and feed-forward) and Pfeiffer et al. 2021 (behind feed-forward alone);
FedMCP eq. 2: `h ← h + GeLU(h·W_down)·W_up`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from silotune.backbone import Backbone, OutputChange, Plan
from silotune.parts import Tensors
from silotune.tuners.base import Tuner, TunerOptions, Weighted, scale, total

if TYPE_CHECKING:
    from silotune.data.tasks import Task

_FIELDS = {"houlsby": ("attention_output", "feedforward_output"), "pfeiffer": ("feedforward_output",)}


class BottleneckOptions(TunerOptions):
    """`r`: the bottleneck's width. `sites`: `houlsby` (two a block) or `pfeiffer` (one a block)."""

    r: int = Field(16, ge=1)
    sites: Literal["houlsby", "pfeiffer"] = "houlsby"


class Bottleneck(Tuner):
    """Adds `GeLU(h·W_down + b_down)·W_up + b_up` to a sublayer's output h, before the residual sum.

    Per site: `down.weight` (r, hidden), `down.bias` (r,), `up.weight` (hidden, r), `up.bias` (hidden,). `up` starts at
    zero, so that an untrained adapter changes nothing.
    """

    name = "bottleneck"
    Options = BottleneckOptions

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Tuner.init`; `down` is drawn from N(0, 0.02²)."""
        tensors: Tensors = {}
        for site in self._sites(backbone):
            width, r = cast(nn.Linear, backbone.site(site)).out_features, self._options.r
            tensors[f"{site}.down.weight"] = torch.randn(r, width, generator=generator) * 0.02
            tensors[f"{site}.down.bias"] = torch.zeros(r)
            tensors[f"{site}.up.weight"] = torch.zeros(width, r)
            tensors[f"{site}.up.bias"] = torch.zeros(width)
        return tensors

    def act(self, backbone: Backbone, mix: Sequence[Weighted], plan: Plan) -> None:
        """See `Tuner.act`: the weighted sum of the adapters' outputs is added (FedMCP, section IV-B)."""
        for site in self._sites(backbone):
            plan.outputs[site].append(_added([(_site(part.tensors, site), part.weight) for part in mix]))

    @property
    def _options(self) -> BottleneckOptions:
        return cast(BottleneckOptions, self.options)

    def _sites(self, backbone: Backbone) -> list[str]:
        fields = _FIELDS[self._options.sites]
        return [backbone.architecture.module(field, block) for block in range(backbone.blocks) for field in fields]


_Weights = tuple[Tensor, Tensor, Tensor, Tensor]


def _site(tensors: Tensors, site: str) -> _Weights:
    down, up = f"{site}.down", f"{site}.up"
    return tensors[f"{down}.weight"], tensors[f"{down}.bias"], tensors[f"{up}.weight"], tensors[f"{up}.bias"]


def _added(adapters: list[tuple[_Weights, float | Tensor]]) -> OutputChange:
    def change(_: Tensor, h: Tensor) -> Tensor:
        outputs = []
        for (down, down_bias, up, up_bias), weight in adapters:
            hidden = nn.functional.gelu(nn.functional.linear(h, down, down_bias))
            outputs.append(scale(nn.functional.linear(hidden, up, up_bias), weight))
        return h + total(outputs)

    return change
