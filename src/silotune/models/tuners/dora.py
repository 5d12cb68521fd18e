"""DoRA: LoRA on the direction of a weight, with a trained length of each of its rows (Liu et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.data.tasks import Task
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan, OutputChange
from silotune.models.backbone.segments import Segments
from silotune.models.tuners.base import MergedAdapter, Tuner, Weight, WeightedTensors, per_row, weighted_sum
from silotune.models.tuners.lora import LoRA
from silotune.models.tuners.low_rank_update import trains
from silotune.models.tuners.target_modules import layer_weight

_MAGNITUDE, _SHIFT = "lora_magnitude_vector", "dora_shift"


class DoRA(LoRA):
    """Replaces a linear layer's weight W by `m ⊙ (W + scale·B·A) / n`, where n are the lengths of the rows of the sum.

    Beside LoRA's tensors a target module has `lora_magnitude_vector` m, shape (out,), named as in peft; it starts as
    the lengths of W's rows. n follows A and B and takes no gradient (section 4.3). With gains g = m / n, what acts is
    linear: `diag(g - 1)·W + scale·(g ⊙ B)·A`. A mix adds the weighted sum of these; the tensors `dora_shift` are g - 1.
    """

    name = "dora"
    plan_holds = False
    module_tensors = ("lora_A.weight", "lora_B.weight", _MAGNITUDE)
    weighs_tokens = False
    groups = {**LoRA.groups, "magnitude": (_MAGNITUDE,)}

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        tensors = super().init(backbone, tasks, generator)
        acting = super().effective(backbone, tensors)
        for module in self.target_modules(tensors):
            tensors[f"{module}.{_MAGNITUDE}"] = self._row_lengths(backbone, module, acting)
        return tensors

    @override
    def effective(self, backbone: Backbone, tensors: Tensors) -> Tensors:
        """Multiply B by the gains, and replace the magnitudes by `dora_shift`."""
        modules = self.target_modules(tensors)
        if f"{modules[0]}.{_MAGNITUDE}" not in tensors:
            return tensors
        acting = dict(super().effective(backbone, tensors))
        with torch.enable_grad():  # what trains says so also in a pass without graph
            for module in modules:
                magnitude = acting.pop(f"{module}.{_MAGNITUDE}")
                gain = magnitude / self._row_lengths(backbone, module, acting)
                acting[f"{module}.lora_B.weight"] = acting[f"{module}.lora_B.weight"] * gain.unsqueeze(1)
                acting[f"{module}.{_SHIFT}"] = gain - 1
        return acting

    @torch.no_grad()
    def _row_lengths(self, backbone: Backbone, module: str, acting: Tensors) -> Tensor:
        """Compute the lengths of the rows of `W + scale·B·A`, shape (out,), without computing that matrix.

        `‖w + s·b·A‖² = ‖w‖² + 2·s·(w·Aᵀ)·bᵀ + s²·b·(A·Aᵀ)·bᵀ` for a row w of W and b of B.
        """
        weight, scale = layer_weight(backbone.module(module)), self._options.scale
        there = acting[f"{module}.lora_A.weight"]
        dtype = torch.promote_types(weight.dtype, there.dtype)
        weight = weight.to(dtype)
        # copies are aligned in memory, as tensors from files need not be: the last bits of A·Aᵀ depend on that
        a, b = (acting[f"{module}.{name}"].to(weight.device, dtype, copy=True) for name in LoRA.module_tensors)
        beside = (weight @ a.T * b).sum(1) * (2 * scale) + ((b @ (a @ a.T)) * b).sum(1) * scale**2
        return (weight.square().sum(1) + beside).clamp_min(0).sqrt().to(there.device, there.dtype)

    @override
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        mix = [replace(part, tensors=self.effective(backbone, part.tensors)) for part in mix]
        if self.draws and trains(mix):
            for module in self.target_modules(mix[0].tensors):
                plan.outputs[module].append(self._with_dropout(backbone.module(module), mix, module))
            return
        for module in self.target_modules(mix[0].tensors):
            shifts: list[tuple[Weight, Tensor]] = [(part.weight, part.tensors[f"{module}.{_SHIFT}"]) for part in mix]
            plan.outputs[module].append(_add_shifted(backbone.module(module), shifts))
        super().act(backbone, mix, plan)

    @override
    def act_on_segments(
        self, backbone: Backbone, mix: Sequence[WeightedTensors], segments: Segments, plan: ForwardPlan
    ) -> bool:
        if self.draws and trains(mix):
            return False
        for module in self.target_modules(mix[0].tensors):
            shifts = [(part.weight, segments.spread(part.tensors[f"{module}.{_SHIFT}"])) for part in mix]
            plan.outputs[module].append(_add_shifted(backbone.module(module), shifts))
        return super().act_on_segments(backbone, mix, segments, plan)

    def _with_dropout(self, layer: nn.Module, mix: Sequence[WeightedTensors], module: str) -> OutputChange:
        """Return the change in training with dropout, which also drops the input of W in the change, as in peft."""
        scale, rate = self._options.scale, self._options.dropout

        def change(x: Tensor, y: Tensor) -> Tensor:
            changed = y
            for part in mix:
                a, b = (part.tensors[f"{module}.{name}"].to(x.dtype) for name in LoRA.module_tensors)
                dropped = nn.functional.dropout(x, rate)
                by_weight = nn.functional.linear(dropped, layer_weight(layer).to(x.dtype)).to(y.dtype)
                by_update = nn.functional.linear(nn.functional.linear(dropped, a), b).to(y.dtype)
                added = by_weight * part.tensors[f"{module}.{_SHIFT}"].to(y.dtype) + by_update * scale
                changed = changed + per_row(part.weight, y) * added
            return changed

        return change

    @override
    def merge(self, mix: Sequence[WeightedTensors]) -> MergedAdapter:
        """Merge A and B as LoRA does, and sum the weighted shifts."""
        merged = super().merge(mix)
        shifts = weighted_sum(mix, [name for name in mix[0].tensors if name.endswith(f".{_SHIFT}")])
        return MergedAdapter(merged.tensors | shifts, merged.options)

    @override
    def weight_delta(self, adapter: MergedAdapter, module: str, layer: nn.Module) -> Tensors:
        shift = adapter.tensors[f"{module}.{_SHIFT}"].double().unsqueeze(1)
        of_lora = super().weight_delta(adapter, module, layer)["weight"]
        return {"weight": of_lora + shift * layer_weight(layer).double()}

    @override
    def peft_config(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> dict[str, Any]:
        return super().peft_config(backbone, adapter, task_type) | {"use_dora": True}

    @override
    def peft_tensors(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> Tensors:
        """Undo the gains of B, and add the magnitudes that give them."""
        tensors: Tensors = {}
        for module in self.target_modules(adapter.tensors):
            gain = adapter.tensors[f"{module}.{_SHIFT}"] + 1
            a, b = (f"{module}.{name}" for name in LoRA.module_tensors)
            plain = {a: adapter.tensors[a], b: adapter.tensors[b] / gain.unsqueeze(1)}
            tensors |= plain | {f"{module}.{_MAGNITUDE}": gain * self._row_lengths(backbone, module, plain)}
        return super().peft_tensors(backbone, MergedAdapter(tensors, adapter.options), task_type)

    @override
    def rate_factor(self, name: str) -> float:
        """Let the magnitudes learn at B's rate, as with peft's LoRA+."""
        return self._options.lr_ratio if name.endswith(_MAGNITUDE) else super().rate_factor(name)

    read_initial = Tuner.read_initial  # a plain LoRA is no DoRA
    pack_initial = Tuner.pack_initial


def _add_shifted(layer: nn.Module, shifts: Sequence[tuple[Weight, Tensor]]) -> OutputChange:
    """Add `Σ weight·shift ⊙ (W·x)` to y = W·x + bias; shifts of shape (out,) or (rows, 1, out)."""
    bias = cast("Tensor | None", layer.bias)

    def change(_: Tensor, y: Tensor) -> Tensor:
        product = y if bias is None else y - bias.to(y.dtype)
        shift = sum(per_row(weight, y) * each.to(y.dtype) for weight, each in shifts)
        return torch.addcmul(y, product, cast(Tensor, shift))

    return change
