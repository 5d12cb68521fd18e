"""Train the backbone's own weights: all, or offsets of biases (BitFit, Ben Zaken et al. 2022); or a change of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors, copy
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan, OutputChange
from silotune.models.tuners.base import MergedAdapter, Tuner, Weight, WeightedTensors, per_row, weighted_sum
from silotune.models.tuners.lora import LoRA
from silotune.models.tuners.low_rank_update import add_product
from silotune.models.tuners.target_modules import TargetModuleOptions, is_linear, layer_widths


class Full(Tuner):
    """All weights of the base transformer, named as its parameters. A mix interpolates them; weights must sum to 1.

    Training runs with the backbone's dropout, unlike all other tuners.
    """

    name = "full"
    trains_backbone = True

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Copy the pretrained weights."""
        return {name: tensor.cpu() for name, tensor in copy(dict(backbone.base.named_parameters())).items()}

    @override
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        plan.weights.update(interpolate(mix))
        plan.dropout = any(tensor.requires_grad for part in mix for tensor in part.tensors.values())

    @override
    def mixes_rows(self, backbone: Backbone) -> bool:
        """Return False: one forward has one set of weights."""
        return False

    def merge(self, mix: Sequence[WeightedTensors]) -> MergedAdapter:
        """Interpolate the weights."""
        return MergedAdapter(copy(interpolate(mix)), self.options.model_dump(mode="json"))


def interpolate(mix: Sequence[WeightedTensors]) -> Tensors:
    """Compute `Σ weight · tensors`, for tuners whose parts replace the backbone's tensors."""
    weights: list[Weight] = []
    for part in mix:
        if isinstance(part.weight, Tensor) and part.weight.dim():
            raise InputError("tuner: parts that replace the backbone's tensors cannot be mixed per row")
        weights.append(part.weight)
    total = sum(float(weight.detach()) if isinstance(weight, Tensor) else weight for weight in weights)
    if abs(total - 1) > 1e-6:
        raise InputError(f"tuner: the weights of parts that replace tensors must sum to 1 (got {weights})")
    if len(mix) == 1:
        return mix[0].tensors
    return weighted_sum(mix)


_WITH_BIASES = "bert, deberta-v2, distilbert, electra, gpt2, gpt_neox, mpnet, qwen2, roberta, xlm-roberta"
"""Families whose linear layers or layer norms have biases, by their configuration's defaults."""


class BitFitOptions(TargetModuleOptions):
    """The options of BitFit."""

    sites: tuple[str, ...] = Field(
        default=("*",),
        description="patterns of module names, e.g. `encoder.layer.*`; by default every linear layer and layer norm",
    )


class BitFit(Tuner):
    """Trains every bias of the backbone's linear layers and layer norms (the embeddings' norm included).

    Each module has one tensor `<module>.bias` of shape (out,), an offset that is **added** to the pretrained bias. It
    starts at zero. Adding it to the module's output equals replacing the bias, and allows mixes per row and frozen
    weights in half precision. A mix adds `Σ weight·offset`; weights that sum to 1 interpolate the biases.
    """

    name = "bitfit"
    plan_holds = True
    Options = BitFitOptions
    module_tensors = ("bias",)

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        tensors: Tensors = {}
        for name, module in backbone.base.named_modules():
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor) and (is_linear(module) or isinstance(module, nn.LayerNorm)):
                tensors[f"{name}.bias"] = torch.zeros(bias.shape)
        if not tensors:
            raise InputError(
                f"tuner: bitfit has nothing to train, {backbone.model_type} has no biases; it works on {_WITH_BIASES}"
            )
        options = cast(BitFitOptions, self.options)
        patterns = options.sites
        selected = {
            name: tensor
            for name, tensor in tensors.items()
            if any(fnmatchcase(name.removesuffix(".bias"), pattern) for pattern in patterns)
        }
        if not selected:
            examples = ", ".join(list(tensors)[:3])
            raise InputError(f"tuner.sites: bitfit finds no bias for {','.join(patterns)}; there are {examples}, …")
        modules = options.chosen(backbone, [name.removesuffix(".bias") for name in selected])
        return {f"{module}.bias": selected[f"{module}.bias"] for module in modules}

    @override
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        for name in mix[0].tensors:
            plan.outputs[name.removesuffix(".bias")].append(_add_offset(mix, name))

    @override
    def merge(self, mix: Sequence[WeightedTensors]) -> MergedAdapter:
        """Merge parts into the weighted sum of their offsets."""
        return MergedAdapter(weighted_sum(mix), self.options.model_dump(mode="json"))

    @override
    def weight_delta(self, adapter: MergedAdapter, module: str, layer: nn.Module) -> Tensors:
        return {"bias": adapter.tensors[f"{module}.bias"].double()}

    @override
    def native_config(self, adapter: MergedAdapter) -> dict[str, Any]:
        return {
            "computes": "y + bias, where y is the module's output (so the pretrained bias moves by `bias`)",
        }


def _add_offset(mix: Sequence[WeightedTensors], name: str) -> OutputChange:
    """Add the mix's offsets to y of shape (rows, tokens, out)."""

    def change(_: Tensor, y: Tensor) -> Tensor:
        offset: float | Tensor = 0.0
        for part in mix:
            bias = part.tensors[name]
            weight = per_row(part.weight, y)
            weight = weight.to(bias.dtype) if isinstance(weight, Tensor) else weight
            offset = offset + weight * bias
        return y + cast(Tensor, offset).to(y.dtype)

    return change


NAME = "delta.weight"


class Delta(Tuner):
    """Computes `W·x + scale·Δ·x` with LoRA's scale, so that Δ adds up products `B·A` of that LoRA.

    Each target module of the LoRA has a `delta.weight` of shape (out, in), which starts at zero. It makes no choice of
    its own, and no configuration names it.

    It has the target modules and the scale of `lora`.
    """

    name = "delta"
    plan_holds = True
    module_tensors = (NAME,)

    def __init__(self, lora: Tuner) -> None:
        assert isinstance(lora, LoRA), "methods with a delta are defined for LoRA"
        super().__init__()
        self._lora = lora

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        modules = self._lora.modules(backbone)
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
