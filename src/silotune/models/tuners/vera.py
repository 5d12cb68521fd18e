"""VeRA: trained vectors d and b around frozen random matrices, the same in all silos (Kopiczko et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.data.tasks import Task
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan, OutputChange
from silotune.models.tuners.base import MergedAdapter, Tuner, WeightedTensors, per_row
from silotune.models.tuners.low_rank_update import trains
from silotune.models.tuners.target_modules import TargetModuleOptions, layer_widths, peft_target_modules

_D, _B = "vera_lambda_d", "vera_lambda_b"
_LOW, _WIDE = "vera_A", "vera_B"
_MERGED = ("lora_A.weight", "lora_B.weight")


class VeRAOptions(TargetModuleOptions):
    """The options of VeRA."""

    r: int = Field(default=256, ge=1, description="the rank of the frozen matrices")
    d_initial: float = Field(default=0.1, description="initial value of d; b starts at 0")
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="seed of A and B, which are equal in all silos and never sent; peft's `projection_prng_key`",
    )
    dropout: float = Field(default=0, ge=0, lt=1, description="dropout of A's input in training")
    sites: tuple[str, ...] = Field(
        default=("query", "value"), description="linear layers of each block, or patterns of names"
    )


class VeRA(Tuner):
    """Adds `b ⊙ B·(d ⊙ A·x)` to a linear layer's output. A mix adds the weighted sum of the parts' updates.

    Each target module has `vera_lambda_d` (r,) and `vera_lambda_b` (out,), named and shaped as in peft. A (r, in) and B
    (out, r) are cut from one pair of matrices, as large as the widest modules need; a part does not hold them.
    """

    name = "vera"
    Options = VeRAOptions
    example = {"r": 7}
    module_tensors = (_D, _B)
    groups = {"d": (_D,), "b": (_B,)}

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        tensors: Tensors = {}
        for module in self._options.modules(backbone, self.name):
            tensors[f"{module}.{_D}"] = torch.full((self._options.r,), self._options.d_initial)
            tensors[f"{module}.{_B}"] = torch.zeros(layer_widths(backbone.module(module))[1])
        return tensors

    @override
    def effective(self, backbone: Backbone, tensors: Tensors) -> Tensors:
        """Return a part's tensors together with the frozen A and B of each module."""
        modules = self.target_modules(tensors)
        if f"{modules[0]}.{_LOW}" in tensors:
            return tensors
        acting = dict(tensors)
        low, wide = self._matrices(backbone, tensors[f"{modules[0]}.{_D}"])
        for module in modules:
            inputs, outputs = layer_widths(backbone.module(module))
            acting[f"{module}.{_LOW}"], acting[f"{module}.{_WIDE}"] = low[:, :inputs], wide[:outputs]
        return acting

    def _matrices(self, backbone: Backbone, like: Tensor) -> tuple[Tensor, Tensor]:
        """Draw A (r, largest input) and B (largest output, r), Kaiming-uniform, as peft does; dtype of `like`."""
        modules = self._options.modules(backbone, self.name)
        inputs, outputs = map(max, zip(*(layer_widths(backbone.module(module)) for module in modules), strict=True))
        seed, rank = self._options.seed, self._options.r

        def drawn() -> tuple[Tensor, Tensor]:
            draws = torch.Generator().manual_seed(seed)
            low = torch.empty(rank, inputs).uniform_(-((6 / inputs) ** 0.5), (6 / inputs) ** 0.5, generator=draws)
            wide = torch.empty(outputs, rank).uniform_(-((6 / rank) ** 0.5), (6 / rank) ** 0.5, generator=draws)
            return low.to(like), wide.to(like)

        return backbone.constant((self.name, seed, rank, inputs, outputs, like.device, like.dtype), drawn)

    @override
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        mix = [replace(part, tensors=self.effective(backbone, part.tensors)) for part in mix]
        dropout = self._options.dropout if trains(mix) else 0.0
        for module in self.target_modules(mix[0].tensors):
            plan.outputs[module].append(_add_update(mix, module, dropout))

    @property
    @override
    def draws(self) -> bool:
        """Whether dropout is on, for which training draws random numbers."""
        return self._options.dropout > 0

    @override
    def merge(self, mix: Sequence[WeightedTensors]) -> MergedAdapter:
        """Build one LoRA whose rank is the sum of the parts' ranks: parts with different b are not one VeRA."""
        tensors: Tensors = {}
        for module in self.target_modules(mix[0].tensors):
            factors = [_factors(part.tensors, module) for part in mix]
            tensors[f"{module}.{_MERGED[0]}"] = torch.cat([low for low, _ in factors])
            wide = [part.weight * wide for part, (_, wide) in zip(mix, factors, strict=True)]
            tensors[f"{module}.{_MERGED[1]}"] = torch.cat(wide, 1)
        return MergedAdapter(tensors, self.options.model_dump(mode="json") | {"r": self._options.r * len(mix)})

    @override
    def target_modules(self, tensors: Tensors) -> list[str]:
        """Return the names of the modules that a VeRA, or the LoRA that `merge` makes of it, changes."""
        endings = tuple(f".{name}" for name in (_D, _MERGED[0]))
        return [name.removesuffix(ending) for name in tensors for ending in endings if name.endswith(ending)]

    @override
    def weight_delta(self, adapter: MergedAdapter, module: str, layer: nn.Module) -> Tensors:
        low, wide = _factors({name: tensor.double() for name, tensor in adapter.tensors.items()}, module)
        return {"weight": wide @ low}

    @override
    def peft_config(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> dict[str, Any]:
        """Return peft's configuration: of a LoRA if the parts were merged, else of a VeRA."""
        options = adapter.options
        common = {**peft_target_modules(backbone, self.target_modules(adapter.tensors)), "bias": "none"}
        if _is_merged(adapter.tensors):
            of_lora = {"lora_alpha": options["r"], "lora_dropout": 0.0, "init_lora_weights": True}
            return {"peft_type": "LORA", "r": options["r"], **common, **of_lora}
        return {
            "peft_type": "VERA",
            "r": options["r"],
            **common,
            "vera_dropout": 0.0,
            "d_initial": options["d_initial"],
            "projection_prng_key": options["seed"],
            "save_projection": True,
        }

    @override
    def peft_tensors(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> Tensors:
        """Return the tensors that peft stores; for a VeRA these include A and B."""
        if _is_merged(adapter.tensors):
            return super().peft_tensors(backbone, adapter, task_type)
        trained = {name: tensor for name, tensor in adapter.tensors.items() if name.endswith(self.module_tensors)}
        low, wide = self._matrices(backbone, next(iter(trained.values())))
        named = super().peft_tensors(backbone, MergedAdapter(trained, adapter.options), task_type)
        return named | {f"base_model.{_LOW}": low, f"base_model.{_WIDE}": wide}

    @property
    def _options(self) -> VeRAOptions:
        return cast(VeRAOptions, self.options)


def _is_merged(tensors: Tensors) -> bool:
    return any(name.endswith(_MERGED) for name in tensors)


def _factors(tensors: Tensors, module: str) -> tuple[Tensor, Tensor]:
    """Return a module's update as two matrices: `d ⊙ A`, shape (r, in), and `b ⊙ B`, shape (out, r)."""
    if f"{module}.{_LOW}" not in tensors:
        return tensors[f"{module}.{_MERGED[0]}"], tensors[f"{module}.{_MERGED[1]}"]
    d, b, low, wide = (tensors[f"{module}.{name}"] for name in (_D, _B, _LOW, _WIDE))
    return d.unsqueeze(1) * low, b.unsqueeze(1) * wide


def _add_update(mix: Sequence[WeightedTensors], module: str, dropout: float) -> OutputChange:
    """Add the mix's updates to y of shape (rows, tokens, out); without dropout, A·x is computed once for all parts."""

    def change(x: Tensor, y: Tensor) -> Tensor:
        low, wide = (mix[0].tensors[f"{module}.{name}"].to(x.device, x.dtype) for name in (_LOW, _WIDE))
        shared = None if dropout else nn.functional.linear(x, low)
        for part in mix:
            d, b = (part.tensors[f"{module}.{name}"] for name in (_D, _B))
            inner = nn.functional.linear(nn.functional.dropout(x, dropout), low) if shared is None else shared
            outer = nn.functional.linear(inner * d.to(inner.dtype), wide).to(y.dtype)
            weight = per_row(part.weight, y)
            y = torch.addcmul(y, outer, b.to(y.dtype) * weight)
        return y

    return change
