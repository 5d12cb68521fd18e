"""LoHa: a weight changes by the elementwise product of two low-rank matrices (Hyeon-Woo et al. 2022, FedPara)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.data.tasks import Task
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.tuners.base import MergedAdapter, Tuner, WeightedTensors, per_row
from silotune.models.tuners.target_modules import TargetModuleOptions, is_transposed, layer_widths, peft_target_modules


class LoHaOptions(TargetModuleOptions):
    """The options of LoHa."""

    r: int = Field(
        default=8, ge=1, description="rank of each of the two matrices; their elementwise product has rank r² at most"
    )
    alpha: float = Field(default=8.0, gt=0, description="the scale is alpha / r")
    sites: tuple[str, ...] = Field(
        default=("query", "value"), description="linear layers of each block, or patterns of names"
    )


class LoHa(Tuner):
    """Adds `alpha / r · ((A₁·B₁) ⊙ (A₂·B₂))·x` to a linear layer's output.

    Each target module has `hada_w1_a` (out, r), `hada_w1_b` (r, in), `hada_w2_a` and `hada_w2_b`, as in peft.
    """

    name = "loha"
    plan_holds = True
    Options = LoHaOptions
    module_tensors = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    example = {"r": 3, "alpha": 5}

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Return initial tensors; the last factor is zero, and so is the change of the weight."""
        options, tensors = cast(LoHaOptions, self.options), {}
        for module in options.modules(backbone, self.name):
            inputs, outputs = layer_widths(backbone.module(module))
            for name in self.module_tensors:
                shape = (outputs, options.r) if name.endswith("_a") else (options.r, inputs)
                drawn = torch.empty(shape).uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
                tensors[f"{module}.{name}"] = torch.zeros(shape) if name == "hada_w2_b" else drawn
        return tensors

    @override
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        for module in self.target_modules(mix[0].tensors):
            plan.outputs[module].append(partial(self._add, mix, module))

    def _add(self, mix: Sequence[WeightedTensors], module: str, x: Tensor, y: Tensor) -> Tensor:
        for part in mix:
            change = nn.functional.linear(x, self._change(part.tensors, module).to(x.dtype)).to(y.dtype)
            y = y + per_row(part.weight, y) * change
        return y

    def _change(self, tensors: Tensors, module: str) -> Tensor:
        """Return a module's change of its weight, shape (out, in)."""
        a1, b1, a2, b2 = (tensors[f"{module}.{name}"] for name in self.module_tensors)
        options = cast(LoHaOptions, self.options)
        return (a1 @ b1) * (a2 @ b2) * (options.alpha / options.r)

    @override
    def weight_delta(self, adapter: MergedAdapter, module: str, layer: nn.Module) -> Tensors:
        tensors = {name: tensor.double() for name, tensor in adapter.tensors.items()}
        return {"weight": self._change(tensors, module)}

    @override
    def peft_config(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> dict[str, Any] | None:
        """Return peft's configuration; None over GPT-2's layers, which peft's LoHa lacks."""
        modules = self.target_modules(adapter.tensors)
        if any(is_transposed(backbone.module(module)) for module in modules):
            return None
        fields = peft_target_modules(backbone, modules)
        del fields["fan_in_fan_out"]
        return {"peft_type": "LOHA", "r": adapter.options["r"], "alpha": adapter.options["alpha"], **fields}
