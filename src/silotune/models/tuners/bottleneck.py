"""Bottleneck adapters: two linear layers with a nonlinearity behind a sublayer.

Houlsby et al. 2019 (behind attention and feed-forward) and Pfeiffer et al. 2021 (behind feed-forward alone);
FedMCP eq. 2: `h ← h + GeLU(h·W_down)·W_up`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.models.backbone.architectures import TARGET_FIELDS
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan, OutputChange
from silotune.models.backbone.segments import Segments
from silotune.models.tuners.base import MergedAdapter, Tuner, WeightedTensors, per_row, scalar_weights, weighted_sum
from silotune.models.tuners.low_rank_update import add_product, scale_columns, times
from silotune.models.tuners.target_modules import TargetModuleOptions, layer_widths

_PLACEMENTS = {"houlsby": ("attention_output", "feedforward_output"), "pfeiffer": ("feedforward_output",)}
"""Placement (a value of `tuner.sites`) → fields of `Architecture` that name the sublayers."""


class BottleneckOptions(TargetModuleOptions):
    """The options of bottleneck adapters."""

    r: int = Field(default=16, ge=1, description="the bottleneck's width")
    reduction: int | None = Field(default=None, ge=1, description="sets r to hidden width / reduction")
    sites: tuple[str, ...] = Field(
        default=("houlsby",),
        description="`houlsby` (two adapters per block), `pfeiffer` (one per block), or names of linear layers",
    )

    @field_validator("sites")
    @classmethod
    def _behind_sublayers(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        for site in sites:
            if site in TARGET_FIELDS and site not in _PLACEMENTS["houlsby"]:
                raise ValueError(
                    f"adapters sit behind sublayers, not at {site!r}; allowed: 'houlsby', 'pfeiffer', "
                    "attention_output, feedforward_output, or patterns of module names"
                )
        return sites


class Bottleneck(Tuner):
    """Adds `GeLU(h·W_down + b_down)·W_up + b_up` to a sublayer's output h, before the residual sum.

    Each target module has `down.weight` (r, hidden), `down.bias` (r,), `up.weight` (hidden, r), `up.bias` (hidden,).
    `up` starts at zero, so that an untrained adapter changes nothing. A mix adds the weighted sum of the adapters'
    outputs (FedMCP, section IV-B).
    """

    name = "bottleneck"
    plan_holds = True
    Options = BottleneckOptions
    example = {"r": 3}
    module_tensors = ("down.weight", "down.bias", "up.weight", "up.bias")

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Return initial tensors; `down` is drawn from N(0, 0.02²)."""
        tensors: Tensors = {}
        options = cast(BottleneckOptions, self.options)
        words = [word for site in options.sites for word in _PLACEMENTS.get(site, (site,))]
        for module in options.modules(backbone, self.name, words):
            width = layer_widths(backbone.module(module))[1]
            r = options.r if options.reduction is None else width // options.reduction
            if r < 1:
                raise InputError(f"tuner.reduction: {options.reduction} leaves nothing of a width of {width}")
            tensors[f"{module}.down.weight"] = torch.randn(r, width, generator=generator) * 0.02
            tensors[f"{module}.down.bias"] = torch.zeros(r)
            tensors[f"{module}.up.weight"] = torch.zeros(width, r)
            tensors[f"{module}.up.bias"] = torch.zeros(width)
        return tensors

    @override
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        for name in mix[0].tensors:
            if name.endswith(".down.weight"):
                module = name.removesuffix(".down.weight")
                plan.outputs[module].append(_add_adapters(mix, module))

    @override
    def act_on_segments(
        self, backbone: Backbone, mix: Sequence[WeightedTensors], segments: Segments, plan: ForwardPlan
    ) -> bool:
        for name in mix[0].tensors:
            if name.endswith(".down.weight"):
                module = name.removesuffix(".down.weight")
                plan.outputs[module].append(_add_adapters_to_segments(mix, module, segments))
        return True

    @override
    def merge(self, mix: Sequence[WeightedTensors]) -> MergedAdapter:
        """Build one adapter as wide as all together, with downs stacked and weighted ups side by side."""
        modules, tensors = self.target_modules(mix[0].tensors), {}
        for module in modules:
            for name in (f"{module}.down.weight", f"{module}.down.bias"):
                tensors[name] = torch.cat([part.tensors[name] for part in mix])
            up = f"{module}.up.weight"
            tensors[up] = torch.cat([part.weight * part.tensors[up] for part in mix], 1)
            tensors |= weighted_sum(mix, [f"{module}.up.bias"])
        width = {"r": len(tensors[f"{modules[0]}.down.bias"]), "reduction": None}
        return MergedAdapter(tensors, self.options.model_dump(mode="json") | width)

    @override
    def native_config(self, adapter: MergedAdapter) -> dict[str, Any]:
        module = self.target_modules(adapter.tensors)[0]
        return {
            "computes": "y + up.weight · gelu(down.weight · y + down.bias) + up.bias, where y is the module's output",
            "r": len(adapter.tensors[f"{module}.down.bias"]),
            "activation": "gelu",
        }


def _add_adapters(mix: Sequence[WeightedTensors], module: str) -> OutputChange:
    """Return the change that adds a mix's adapters as one wide adapter: `down` stacked, weighted `up` side by side."""
    numbers = scalar_weights(mix)

    def each(name: str) -> list[Tensor]:
        return [part.tensors[f"{module}.{name}"] for part in mix]

    def change(_: Tensor, h: Tensor) -> Tensor:
        down, bias, up, shift = each("down.weight"), each("down.bias"), each("up.weight"), each("up.bias")
        if len(mix) == 1 and numbers == [1]:
            hidden = nn.functional.gelu(nn.functional.linear(h, down[0].to(h.dtype), bias[0].to(h.dtype)))
            return h + nn.functional.linear(hidden, up[0].to(h.dtype), shift[0].to(h.dtype))
        low = nn.functional.linear(h, torch.cat(down).to(h.dtype), torch.cat(bias).to(h.dtype))
        hidden = nn.functional.gelu(low)
        if numbers is None:
            hidden = scale_columns(hidden, mix, len(bias[0]))
            wide = torch.cat(up, 1)
            shifted = h
            for part, up_bias in zip(mix, shift, strict=True):
                weight = per_row(part.weight, h)
                shifted = shifted + up_bias.to(h.dtype) * weight
            return add_product(shifted, hidden, wide)
        wide = torch.cat([times(tensor, number) for tensor, number in zip(up, numbers, strict=True)], 1)
        total = torch.stack([times(tensor, number) for tensor, number in zip(shift, numbers, strict=True)]).sum(0)
        return h + nn.functional.linear(hidden, wide.to(h.dtype), total.to(h.dtype))

    return change


def _add_adapters_to_segments(mix: Sequence[WeightedTensors], module: str, segments: Segments) -> OutputChange:
    """Do `_add_adapters` for tensors of shape (segments, …), with two batched products for all segments."""
    numbers = scalar_weights(mix)
    assert numbers is not None, "segments have numbers for weights"

    def each(name: str) -> list[Tensor]:
        return [part.tensors[f"{module}.{name}"] for part in mix]

    def weighted(name: str) -> list[Tensor]:
        return [times(tensor, number) for tensor, number in zip(each(name), numbers, strict=True)]

    def change(_: Tensor, h: Tensor) -> Tensor:
        down, bias = (torch.cat(each(name), 1).to(h.dtype) for name in ("down.weight", "down.bias"))
        wide, shift = torch.cat(weighted("up.weight"), 2).to(h.dtype), torch.stack(weighted("up.bias")).sum(0)
        hidden = nn.functional.gelu(torch.baddbmm(bias.unsqueeze(1), segments.group(h), down.mT))
        return segments.add_product(h, hidden, wide, shift.to(h.dtype))

    return change
