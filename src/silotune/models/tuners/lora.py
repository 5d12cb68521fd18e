"""LoRA: a low-rank update of linear layers (Hu et al. 2022): `W·x + (alpha / r)·B·A·x`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from silotune.core.tensors import Tensors
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan, OutputChange
from silotune.models.initializers import uniform
from silotune.models.tuners.base import MergedAdapter, Tuner, WeightedTensors, per_row, scalar_weights
from silotune.models.tuners.initial_adapter import InitialAdapter, unpack
from silotune.models.tuners.peft_import import read_peft_lora
from silotune.models.tuners.target_modules import (
    TargetModuleOptions,
    find_target_modules,
    layer_widths,
    peft_target_modules,
)

if TYPE_CHECKING:
    from silotune.data.tasks import Task
    from silotune.models.backbone.segments import Segments


class LoRAOptions(TargetModuleOptions):
    """`r`: the rank. `alpha`: the scale is alpha / r. `ranks`: silo → its own rank, up to r, at the same scale.

    `sites`: linear layers of each block, or patterns of names; where query, key and value are one fused layer (GPT-2,
    ModernBERT), each of these words names that layer. `dropout`: probability of dropping an input of A in training,
    drawn separately for each part and module.
    """

    r: int = Field(8, ge=1)
    alpha: float = Field(16, gt=0)
    dropout: float = Field(0, ge=0, lt=1)
    sites: tuple[str, ...] = ("query", "value")
    ranks: dict[str, int] = {}

    newer: ClassVar[tuple[str, ...]] = ("ranks",)

    @model_validator(mode="after")
    def _up_to_r(self) -> LoRAOptions:
        for silo, rank in self.ranks.items():
            if not 1 <= rank <= self.r:
                raise ValueError(f"ranks: {rank} of silo {silo!r}; allowed: 1 to {self.r} (tuner.r)")
        return self


class LoRA(Tuner):
    """Adds `(alpha / r)·B·A·x` to a linear layer's output. A mix adds the weighted sum of the parts' updates.

    Each target module has `lora_A.weight` (r, in) and `lora_B.weight` (out, r), named and shaped as in peft; B starts
    at zero. Dropout applies to x, as in peft, in views with trained parts alone: neither in predictions nor in views of
    constant parts.
    """

    name = "lora"
    Options = LoRAOptions
    module_tensors = ("lora_A.weight", "lora_B.weight")
    groups = {"A": ("lora_A.weight",), "B": ("lora_B.weight",)}

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Tuner.init`; A is uniform in ±1/√in, as in the authors' code and in peft."""
        tensors: Tensors = {}
        for module in find_target_modules(backbone, self._options.sites, self.name):
            inputs, outputs = layer_widths(backbone.module(module))
            tensors[f"{module}.lora_A.weight"] = uniform(generator, 1 / math.sqrt(inputs), self._options.r, inputs)
            tensors[f"{module}.lora_B.weight"] = torch.zeros(outputs, self._options.r)
        return tensors

    @property
    def rank(self) -> int:
        """See `Tuner.rank`."""
        return self._options.r

    @property
    def ranks(self) -> Mapping[str, int]:
        """See `Tuner.ranks`."""
        return {silo: rank for silo, rank in self._options.ranks.items() if rank != self._options.r}

    def at_rank(self, tensors: Tensors, rank: int) -> Tensors:
        """See `Tuner.at_rank`: the first rows of A and columns of B."""
        cut = {name: tensor[:rank].clone() for name, tensor in tensors.items() if name.endswith(".lora_A.weight")}
        cut |= {name: tensor[:, :rank].clone() for name, tensor in tensors.items() if name.endswith(".lora_B.weight")}
        return tensors | cut

    def options_of(self, tensors: Tensors) -> dict[str, Any]:
        """See `Tuner.options_of`; alpha / r is that of the run, whatever the adapter's rank."""
        options = {key: value for key, value in self.options.resolved().items() if key != "ranks"}
        rank = next(len(tensor) for name, tensor in tensors.items() if name.endswith(".lora_A.weight"))
        if rank == self._options.r:
            return options
        return options | {"r": rank, "alpha": self._options.alpha * rank / self._options.r}

    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        """See `Tuner.act`."""
        dropout = self._options.dropout if _trains(mix) else 0.0
        for name in mix[0].tensors:
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                plan.outputs[module].append(_add_update(mix, module, self.scale, dropout))

    def act_on_segments(
        self, backbone: Backbone, mix: Sequence[WeightedTensors], segments: Segments, plan: ForwardPlan
    ) -> bool:
        """See `Tuner.act_on_segments`."""
        if self.draws and _trains(mix):
            return False
        for name in mix[0].tensors:
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                plan.outputs[module].append(_add_update_to_segments(mix, module, self.scale, segments))
        return True

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        return self._options.alpha / self._options.r

    @property
    def sites(self) -> tuple[str, ...]:
        """The words that name the target modules."""
        return self._options.sites

    @property
    def draws(self) -> bool:
        """See `Tuner.draws`; dropout does."""
        return self._options.dropout > 0

    def merge(self, mix: Sequence[WeightedTensors]) -> MergedAdapter:
        """See `Tuner.merge`: one LoRA of all ranks at the same alpha / r, A stacked and weighted B side by side."""
        tensors: Tensors = {}
        options = self.options_of(mix[0].tensors)
        for module in self.target_modules(mix[0].tensors):
            a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
            tensors[a] = torch.cat([part.tensors[a] for part in mix])
            tensors[b] = torch.cat([part.weight * part.tensors[b] for part in mix], 1)
        return MergedAdapter(tensors, options | {key: options[key] * len(mix) for key in ("r", "alpha")})

    def weight_delta(self, adapter: MergedAdapter, module: str, layer: nn.Module) -> Tensors:
        """See `Tuner.weight_delta`: `(alpha / r)·B·A`."""
        a, b = (adapter.tensors[f"{module}.{name}"].double() for name in self.module_tensors)
        return {"weight": b @ a * (adapter.options["alpha"] / adapter.options["r"])}

    def peft_config(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> dict[str, Any]:
        """See `Tuner.peft_config`."""
        alpha = adapter.options["alpha"]
        return {
            "peft_type": "LORA",
            **peft_target_modules(backbone, self.target_modules(adapter.tensors)),
            "r": adapter.options["r"],
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "init_lora_weights": True,
        }

    def read_initial(self, source: str, backbone: Backbone) -> Tensors:
        """See `Tuner.read_initial`: from a folder in peft's layout, or a file that `silotune import` wrote."""
        path = Path(source)
        initial = read_peft_lora(path, backbone) if path.is_dir() else unpack(path)
        expected = self.init(backbone, [], torch.Generator().manual_seed(0))
        return initial.matched(source, self._options.r, self._options.alpha, expected)

    def pack_initial(self, tensors: Tensors) -> bytes:
        """See `Tuner.pack_initial`."""
        return InitialAdapter(tensors, self._options.r, self._options.alpha, self._options.sites).pack()

    @property
    def _options(self) -> LoRAOptions:
        return cast(LoRAOptions, self.options)


def _add_update(mix: Sequence[WeightedTensors], module: str, factor: float, dropout: float) -> OutputChange:
    """Compute the mix in two products, with A of all parts stacked and B of all parts side by side.

    With dropout there is one product with A per part, since each part drops other inputs.
    """
    down = [part.tensors[f"{module}.lora_A.weight"] for part in mix]
    up = [part.tensors[f"{module}.lora_B.weight"] for part in mix]
    numbers = scalar_weights(mix)
    if numbers is not None and not dropout and not torch.is_grad_enabled():
        return _add_constant_update(_concatenate(down, 0), _weighted(up, numbers, factor))

    def change(x: Tensor, y: Tensor) -> Tensor:
        if dropout:
            low = torch.cat([nn.functional.linear(nn.functional.dropout(x, dropout), a.to(x.dtype)) for a in down], -1)
        else:
            low = nn.functional.linear(x, _concatenate(down, 0).to(x.dtype))
        if numbers is None:
            low = scale_columns(low, mix, down[0].shape[0], factor)
            wide = _concatenate(up, 1)
        else:
            wide = _weighted(up, numbers, factor)
        return add_product(y, low, wide)

    return change


def _add_constant_update(down: Tensor, wide: Tensor) -> OutputChange:
    """`_add_update` without gradient: a plan is used for many forwards in generation, and its tensors are cast once.

    Args:
        down: shape (ranks of all parts, in).
        wide: shape (out, ranks of all parts), with weights and scale.
    """
    cast_to: dict[tuple[torch.dtype, torch.dtype], tuple[Tensor, Tensor]] = {}

    def change(x: Tensor, y: Tensor) -> Tensor:
        product = y.dtype if torch.is_autocast_enabled(x.device.type) else x.dtype
        if (product, y.dtype) not in cast_to:
            cast_to[product, y.dtype] = down.to(product), wide.to(y.dtype)
        a, b = cast_to[product, y.dtype]
        return add_product(y, nn.functional.linear(x, a), b)

    return change


def _weighted(up: Sequence[Tensor], numbers: Sequence[float], factor: float) -> Tensor:
    """B of all parts side by side, each times its weight and scale."""
    return _concatenate([times(b, number * factor) for b, number in zip(up, numbers, strict=True)], 1)


def _trains(mix: Sequence[WeightedTensors]) -> bool:
    """Whether a part of the mix is trained."""
    return any(tensor.requires_grad for part in mix for tensor in part.tensors.values())


def _add_update_to_segments(
    mix: Sequence[WeightedTensors], module: str, factor: float, segments: Segments
) -> OutputChange:
    """Variant of `_add_update` for tensors of shape (segments, …): two batched products for all segments."""
    numbers = scalar_weights(mix)
    assert numbers is not None, "segments have numbers for weights"

    def change(x: Tensor, y: Tensor) -> Tensor:
        down = _concatenate([part.tensors[f"{module}.lora_A.weight"] for part in mix], 1).to(x.dtype)
        up = [part.tensors[f"{module}.lora_B.weight"] for part in mix]
        wide = _concatenate([times(b, number * factor) for b, number in zip(up, numbers, strict=True)], 2).to(y.dtype)
        low = torch.bmm(segments.group(x), down.mT)
        return segments.add_product(y, low.to(y.dtype), wide)

    return change


def add_product(y: Tensor, low: Tensor, wide: Tensor) -> Tensor:
    """Compute `y + low·wideᵀ` in one pass over y. Shapes: y (…, out), low (…, r), wide (out, r)."""
    flat = torch.addmm(y.reshape(-1, y.shape[-1]), low.reshape(-1, low.shape[-1]).to(y.dtype), wide.to(y.dtype).t())
    return flat.view(y.shape)


def scale_columns(low: Tensor, mix: Sequence[WeightedTensors], width: int, factor: float = 1.0) -> Tensor:
    """Multiply each part's `width` columns of `low` (rows, tokens, parts·width) by the part's weight and `factor`."""
    scaled = []
    for part, columns in zip(mix, torch.split(low, width, -1), strict=True):
        weight = part.weight
        scaled.append(columns * (per_row(weight, columns) * factor if isinstance(weight, Tensor) else weight * factor))
    return torch.cat(scaled, -1)


def times(tensor: Tensor, number: float) -> Tensor:
    """Compute `number · tensor`, without a copy for 1."""
    return tensor if number == 1 else tensor * number


def _concatenate(tensors: list[Tensor], dimension: int) -> Tensor:
    """Concatenate without a copy of a single tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dimension)
