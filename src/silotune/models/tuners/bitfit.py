"""BitFit: only the backbone's bias terms are trained (Ben Zaken et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from silotune.core.tensors import Tensors
from silotune.errors import InputError
from silotune.models.backbone.architectures import ARCHITECTURES
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan, OutputChange
from silotune.models.tuners.base import MergedAdapter, Tuner, WeightedTensors, per_row, weighted_sum
from silotune.models.tuners.target_modules import SiteOptions, is_linear

if TYPE_CHECKING:
    from silotune.data.tasks import Task


_WITHOUT_BIASES = ("llama", "mistral", "modernbert", "qwen3", "t5")
"""Families whose published models have no bias terms."""


class BitFitOptions(SiteOptions):
    """`sites`: patterns of module names, e.g. `encoder.layer.*`; by default every linear layer and layer norm."""

    sites: tuple[str, ...] = ("*",)


class BitFit(Tuner):
    """Trains every bias of the backbone's linear layers and layer norms (the embeddings' norm included).

    Per module one tensor `<module>.bias`: what is **added** to the pretrained bias. It starts at zero, and adding it
    to the module's output is the same as replacing the bias, which allows mixes per row and frozen weights in half
    precision. A mix with weights that sum to 1 interpolates the biases; in general it adds `Σ weight·offset`.
    """

    name = "bitfit"
    Options = BitFitOptions
    module_tensors = ("bias",)

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Tuner.init`."""
        tensors: Tensors = {}
        for name, module in backbone.base.named_modules():
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor) and (is_linear(module) or isinstance(module, nn.LayerNorm)):
                tensors[f"{name}.bias"] = torch.zeros(bias.shape)
        if not tensors:
            having = ", ".join(name for name in sorted(ARCHITECTURES) if name not in _WITHOUT_BIASES)
            raise InputError(
                f"tuner: bitfit has nothing to train, {backbone.model_type} has no biases; it works on {having}"
            )
        patterns = cast(BitFitOptions, self.options).sites
        chosen = {
            name: tensor
            for name, tensor in tensors.items()
            if any(fnmatchcase(name.removesuffix(".bias"), pattern) for pattern in patterns)
        }
        if not chosen:
            examples = ", ".join(list(tensors)[:3])
            raise InputError(f"tuner.sites: bitfit finds no bias for {','.join(patterns)}; there are {examples}, …")
        return chosen

    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        """See `Tuner.act`."""
        for name in mix[0].tensors:
            plan.outputs[name.removesuffix(".bias")].append(_moved(mix, name))

    def merge(self, mix: Sequence[WeightedTensors]) -> MergedAdapter:
        """See `Tuner.merge`: offsets add up."""
        return MergedAdapter(weighted_sum(mix), self.options.model_dump(mode="json"))

    def weight_delta(self, adapter: MergedAdapter, module: str, layer: nn.Module) -> Tensors:
        """See `Tuner.weight_delta`."""
        return {"bias": adapter.tensors[f"{module}.bias"].double()}

    def native_config(self, adapter: MergedAdapter) -> dict[str, Any]:
        """See `Tuner.native_config`."""
        return {
            "computes": "y + bias, where y is the module's output (so the pretrained bias moves by `bias`)",
        }


def _moved(mix: Sequence[WeightedTensors], name: str) -> OutputChange:
    def change(_: Tensor, y: Tensor) -> Tensor:
        offset: float | Tensor = 0.0
        for part in mix:
            bias = part.tensors[name]
            weight = per_row(part.weight, y).to(bias.dtype) if isinstance(part.weight, Tensor) else part.weight
            offset = offset + weight * bias
        return y + cast(Tensor, offset).to(y.dtype)

    return change
