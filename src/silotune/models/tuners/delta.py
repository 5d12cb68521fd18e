"""Add a dense change of weights that the server sends down and that no phase trains, at LoRA's target modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.data.tasks import Task
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan, OutputChange
from silotune.models.tuners.base import MergedAdapter, Tuner, WeightedTensors, per_row
from silotune.models.tuners.lora import LoRA
from silotune.models.tuners.low_rank_update import add_product
from silotune.models.tuners.target_modules import find_target_modules, layer_widths

NAME = "delta.weight"


class Delta(Tuner):
    """Computes `W·x + scale·Δ·x` with LoRA's scale, so that Δ adds up products `B·A` of that LoRA.

    Each target module of the LoRA has a `delta.weight` of shape (out, in), which starts at zero. It makes no choice of
    its own, and no configuration names it.

    Args:
        lora: the tuner whose target modules and scale it has.
    """

    name = "delta"
    module_tensors = (NAME,)

    def __init__(self, lora: Tuner) -> None:
        assert isinstance(lora, LoRA), "methods with a delta are defined for LoRA"
        super().__init__()
        self._lora = lora

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        modules = find_target_modules(backbone, self._lora.sites, self._lora.name)
        widths = {module: layer_widths(backbone.module(module)) for module in modules}
        return {f"{module}.{NAME}": torch.zeros(outputs, inputs) for module, (inputs, outputs) in widths.items()}

    @override
    def select(self, tensors: Tensors) -> Tensors:
        """Start a delta at zero, whatever LoRA a run starts with."""
        return {}

    @override
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        for module in self.target_modules(mix[0].tensors):
            deltas = [(part.tensors[f"{module}.{NAME}"], part.weight) for part in mix]
            plan.outputs[module].append(_add_deltas(deltas, self._lora.scale))

    @override
    def weight_delta(self, adapter: MergedAdapter, module: str, layer: nn.Module) -> Tensors:
        """Return `scale·Δ`."""
        return {"weight": self._lora.scale * adapter.tensors[f"{module}.{NAME}"].double()}


def _add_deltas(deltas: Sequence[tuple[Tensor, float | Tensor]], scale: float) -> OutputChange:
    def change(x: Tensor, y: Tensor) -> Tensor:
        for delta, weight in deltas:
            if isinstance(weight, Tensor):
                product = nn.functional.linear(x, (delta * scale).to(x.dtype)).to(y.dtype)
                y = y + per_row(weight, product) * product
            else:
                y = add_product(y, x, delta * (weight * scale))
        return y

    return change
