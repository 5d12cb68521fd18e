"""(IA)³: learned factors of keys, values and feed-forward activations (Liu et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.data.tasks import Task
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.tuners.base import MergedAdapter, Tuner, WeightedTensors, per_row, weighted_sum
from silotune.models.tuners.target_modules import (
    TargetModuleOptions,
    layer_widths,
    linear_weight,
    parse_words,
    peft_target_modules,
    short_names,
)


class IA3Options(TargetModuleOptions):
    """The options of (IA)³."""

    sites: tuple[str, ...] = Field(default=("key", "value"), description="linear layers whose output is scaled")
    feedforward: tuple[str, ...] = Field(
        default=("feedforward_output",),
        description="linear layers whose input is scaled. A fused layer of query, key and value is scaled as a whole, "
        "as in peft",
    )

    @field_validator("feedforward", mode="before")
    @classmethod
    def _feedforward_words(cls, value: object) -> object:
        return parse_words(value) if value else ()


class IA3(Tuner):
    """Multiplies a linear layer's output, or its input, by a vector l. All factors start at 1.

    Each target module has one tensor `ia3_l`, named and shaped as in peft: (out, 1) where it scales the output, (1, in)
    where it scales the input. A mix adds up the changes: `y·(1 + Σ weight·(l - 1))`.
    """

    name = "ia3"
    plan_holds = True
    Options = IA3Options
    module_tensors = ("ia3_l",)

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        options = cast(IA3Options, self.options)
        inputs = options.modules(backbone, self.name, options.feedforward) if options.feedforward else []
        tensors: Tensors = {}
        for module in options.modules(backbone, self.name):
            if module not in inputs:
                tensors[f"{module}.ia3_l"] = torch.ones(layer_widths(backbone.module(module))[1], 1)
        for module in inputs:
            tensors[f"{module}.ia3_l"] = torch.ones(1, layer_widths(backbone.module(module))[0])
        return tensors

    @override
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        for name, tensor in mix[0].tensors.items():
            module = name.removesuffix(".ia3_l")
            if tensor.shape[0] == 1:
                plan.inputs[module].append(partial(_scale, name, mix))
            else:
                plan.outputs[module].append(partial(_scale_output, name, mix))

    @override
    def merge(self, mix: Sequence[WeightedTensors]) -> MergedAdapter:
        """Merge parts into `Σ weight·l + (1 - Σ weight)`, because a factor of 1 changes nothing."""
        rest = 1 - sum(part.weight for part in mix)
        tensors = {name: tensor + rest for name, tensor in weighted_sum(mix).items()}
        return MergedAdapter(tensors, self.options.model_dump(mode="json"))

    @override
    def weight_delta(self, adapter: MergedAdapter, module: str, layer: nn.Module) -> Tensors:
        """Scale weight and bias by l of shape (out, 1), or the weight alone by l of shape (1, in)."""
        factor, weight = adapter.tensors[f"{module}.ia3_l"].double(), linear_weight(layer).double()
        delta = {"weight": weight * factor - weight}
        if factor.shape[0] != 1 and layer.bias is not None:
            bias = cast(Tensor, layer.bias).double()
            delta["bias"] = bias * factor.flatten() - bias
        return delta

    @override
    def peft_config(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> dict[str, Any]:
        modules = self.target_modules(adapter.tensors)
        inputs = [module for module in modules if adapter.tensors[f"{module}.ia3_l"].shape[0] == 1]
        feedforward = short_names(backbone, inputs) if inputs else []
        if any(module.endswith(tuple(feedforward)) != (module in inputs) for module in modules):
            feedforward = inputs  # peft compares the ends of names, not their words
        more = {"feedforward_modules": feedforward, "init_ia3_weights": True}
        return {"peft_type": "IA3"} | peft_target_modules(backbone, modules) | more


def _scale_output(name: str, mix: Sequence[WeightedTensors], _: Tensor, y: Tensor) -> Tensor:
    return _scale(name, mix, y)


def _scale(name: str, mix: Sequence[WeightedTensors], y: Tensor) -> Tensor:
    """Compute `y·(Σ weight·l + (1 - Σ weight))` for y of shape (rows, tokens, width), each l of shape (width,).

    This order of terms gives exactly y·l for one part of weight 1, and exactly y where all weights are 0.
    """
    rest: float | Tensor = 1.0
    factor: float | Tensor = 0.0
    for part in mix:
        vector = part.tensors[name].flatten()
        weight = per_row(part.weight, y)
        weight = weight.to(vector.dtype) if isinstance(weight, Tensor) else weight
        factor = factor + weight * vector
        rest = rest - weight
    return y * cast(Tensor, factor + rest).to(y.dtype)
