"""LoRA: a low-rank update of linear layers (Hu et al. 2022): `W·x + (alpha / r)·B·A·x`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.randomness import generator as derived_generator
from silotune.core.tensors import Tensors, uniform
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.quantization import NONE
from silotune.models.backbone.segments import Segments
from silotune.models.tuners.base import MergedAdapter, Tuner, WeightedTensors
from silotune.models.tuners.low_rank_update import add_to_experts, add_update, add_update_to_segments, trains
from silotune.models.tuners.start_adapter import StartAdapter, read_peft_lora, unpack
from silotune.models.tuners.target_modules import (
    TargetModuleOptions,
    expert_widths,
    experts_are_transposed,
    layer_weight,
    layer_widths,
    peft_target_modules,
)

Factors = tuple[Tensor, Tensor]
"""A of shape (r, in) and B of shape (out, r)."""


class LoRAOptions(TargetModuleOptions):
    """The options of LoRA, and of tuners that extend it."""

    r: int = Field(default=8, ge=1, description="the rank")
    alpha: float = Field(default=16, gt=0, description="the scale is alpha / r")
    dropout: float = Field(
        default=0,
        ge=0,
        lt=1,
        description="dropout of A's input in training, drawn separately for each part and module",
    )
    sites: tuple[str, ...] = Field(
        default=("query", "value"),
        description="linear layers of each block, or patterns of names; in a fused layer (GPT-2, ModernBERT) `query`, "
        "`key` and `value` all name that layer",
    )
    ranks: dict[str, int] = Field(default={}, description="silo → rank, at most r, with the same scale")
    scaling: Literal["standard", "rslora"] = Field(
        default="standard", description="scale alpha / r (`standard`) or alpha / √r (`rslora`, Kalajdzievski 2023)"
    )
    init: Literal["uniform", "orthogonal", "pissa"] = Field(
        default="uniform",
        description="start of A and B: `uniform` (B is 0), `orthogonal` to each other (r must be even), or the weight's"
        " principal part, which is then subtracted (`pissa`, Meng et al. 2024)",
    )
    lr_ratio: float = Field(default=1, gt=0, description="B's learning rate over A's (LoRA+, Hayou et al. 2024)")

    @model_validator(mode="after")
    def _up_to_r(self) -> Self:
        for silo, rank in self.ranks.items():
            if not 1 <= rank <= self.r:
                raise ValueError(f"ranks: {rank} of silo {silo!r}; allowed: 1 to {self.r} (tuner.r)")
        return self

    @model_validator(mode="after")
    def _possible_start(self) -> Self:
        if self.init == "orthogonal" and self.r % 2:
            raise ValueError(f"init=orthogonal needs an even r (got {self.r})")
        if self.init == "pissa" and self.dropout:
            raise ValueError("dropout: would drop inputs of the weight itself with init=pissa; allowed: 0")
        if self.init != "uniform" and self.ranks:
            raise ValueError(f"ranks: a start cut to another rank is none of init={self.init}; allowed: init=uniform")
        return self

    @property
    def standard_alpha(self) -> float:
        """Compute the alpha whose alpha / r is the same scale."""
        return self.alpha * math.sqrt(self.r) if self.scaling == "rslora" else self.alpha

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        return self.standard_alpha / self.r


def options_of(adapter: MergedAdapter) -> LoRAOptions:
    """Return the rank and the scale of an exported LoRA."""
    return LoRAOptions(**{key: adapter.options[key] for key in ("r", "alpha", "scaling") if key in adapter.options})


class LoRA(Tuner):
    """Adds `scale·B·A·x` to a linear layer's output. A mix adds the weighted sum of the parts' updates.

    Each target module has `lora_A.weight` (r, in) and `lora_B.weight` (out, r), named and shaped as in peft. A tensor
    of experts has `lora_A.weight` (experts, r, in) and `lora_B.weight` (experts, out, r), and the sum of weights and
    updates is computed for each forward: such mixes cannot differ by row.
    Dropout applies to x, as in peft, in views with trained parts alone: neither in predictions nor in views of
    constant parts.
    """

    name = "lora"
    Options = LoRAOptions
    example = {"r": 3, "alpha": 5}
    module_tensors: ClassVar[tuple[str, ...]] = ("lora_A.weight", "lora_B.weight")
    weighs_tokens = True
    groups = {"A": ("lora_A.weight",), "B": ("lora_B.weight",)}

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Tuner.init`."""
        options = self._options
        tensors: Tensors = {}
        for module in self._find_modules(backbone):
            if module in backbone.experts:
                experts, inputs, outputs = expert_widths(backbone, module)
                factors = [INITS[options.init](inputs, outputs, options.r, generator) for _ in range(experts)]
                a, b = torch.stack([a for a, _ in factors]), torch.stack([b for _, b in factors])
            elif options.init == "pissa":
                a, b = self._principal(backbone, module, torch.zeros(()))
            else:
                widths = layer_widths(backbone.module(module))
                a, b = INITS[options.init](*widths, options.r, generator)
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b
        return tensors

    def _find_modules(self, backbone: Backbone) -> list[str]:
        """Find the target modules; refuse options that experts do not have."""
        options = self._options
        modules = options.modules(backbone, self.name, experts=type(self) is LoRA)
        if not backbone.experts.isdisjoint(modules):
            for name, value, allowed in (("dropout", options.dropout, 0), ("init", options.init == "pissa", "uniform")):
                if value:
                    raise InputError(
                        f"tuner.{name}: experts have none; allowed: tuner.{name}={allowed}, or tuner.sites without the "
                        "feed-forward network"
                    )
        return modules

    @override
    def mixes_rows(self, backbone: Backbone) -> bool:
        """Return False where experts are tuned, whose weights are replaced."""
        tunes_experts = bool(backbone.experts) and not backbone.experts.isdisjoint(self._find_modules(backbone))
        return super().mixes_rows(backbone) and not tunes_experts

    @property
    @override
    def rank(self) -> int:
        return self._options.r

    @property
    @override
    def ranks(self) -> Mapping[str, int]:
        return {silo: rank for silo, rank in self._options.ranks.items() if rank != self._options.r}

    @override
    def at_rank(self, tensors: Tensors, rank: int) -> Tensors:
        """Keep the first rows of A and the first columns of B."""
        of_a, of_b = (f".{name}" for name in LoRA.module_tensors)
        cut = {name: tensor[..., :rank, :].clone() for name, tensor in tensors.items() if name.endswith(of_a)}
        cut |= {name: tensor[..., :rank].clone() for name, tensor in tensors.items() if name.endswith(of_b)}
        return tensors | cut

    @override
    def options_of(self, tensors: Tensors) -> dict[str, Any]:
        """Keep the scale of the run, whatever the adapter's rank."""
        options = {key: value for key, value in self.options.model_dump(mode="json").items() if key != "ranks"}
        rank = next(tensor.shape[-2] for name, tensor in tensors.items() if name.endswith(".lora_A.weight"))
        if rank == self._options.r:
            return options
        options.pop("scaling", None)
        return options | {"r": rank, "alpha": self._options.standard_alpha * rank / self._options.r}

    def effective(self, backbone: Backbone, tensors: Tensors) -> Tensors:
        """See `Tuner.effective`.

        With `init=pissa` the frozen weight stays whole, for all views and silos: what acts is `B·A - B₀·A₀`, where A₀
        and B₀ are the start. Written as `(B - B₀)·A + B₀·(A - A₀)`, a LoRA of rank 2·r, it is exactly 0 at the start.
        """
        if self._options.init != "pissa":
            return tensors
        acting = dict(tensors)
        with torch.enable_grad():  # what trains says so also in a pass without graph
            for module in self.target_modules(tensors):
                a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
                if len(a) != self._options.r:  # acting tensors already
                    return tensors
                start_a, start_b = self._principal(backbone, module, a)
                acting[f"{module}.lora_A.weight"] = torch.cat([a, a - start_a])
                acting[f"{module}.lora_B.weight"] = torch.cat([b - start_b, start_b], 1)
        return acting

    def _principal(self, backbone: Backbone, module: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return PiSSA's A₀ and B₀ of a module at this scale, with dtype and device of `like`."""
        a, b = principal_factors(backbone, module, self._options.r, like.device, "init=pissa")
        root = math.sqrt(self._options.scale)
        return (a / root).to(like.dtype), (b / root).to(like.dtype)

    @property
    @override
    def starts_in_weights(self) -> bool:
        return self._options.init == "pissa"

    @override
    def rate_factor(self, name: str) -> float:
        return self._options.lr_ratio if name.endswith(self.groups["B"]) else 1.0

    @override
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        mix = [replace(part, tensors=self.effective(backbone, part.tensors)) for part in mix]
        dropout = self._options.dropout if trains(mix) else 0.0
        for name in mix[0].tensors:
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                if module in backbone.experts:
                    weight = plan.weights.get(module, backbone.base.get_parameter(module))
                    transposed = experts_are_transposed(backbone.base, module)
                    plan.weights[module] = add_to_experts(weight, mix, module, self.scale, transposed)
                else:
                    plan.outputs[module].append(add_update(mix, module, self.scale, dropout))

    @override
    def act_on_segments(
        self, backbone: Backbone, mix: Sequence[WeightedTensors], segments: Segments, plan: ForwardPlan
    ) -> bool:
        if (self.draws and trains(mix)) or not backbone.experts.isdisjoint(self.target_modules(mix[0].tensors)):
            return False
        for name in mix[0].tensors:
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                plan.outputs[module].append(add_update_to_segments(mix, module, self.scale, segments))
        return True

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        return self._options.scale

    def modules(self, backbone: Backbone) -> list[str]:
        """Return the names of the target modules."""
        return self._options.modules(backbone, self.name)

    @property
    @override
    def plan_holds(self) -> bool:
        return not self.starts_in_weights

    @property
    @override
    def draws(self) -> bool:
        """Whether training draws random numbers, which it does for dropout."""
        return self._options.dropout > 0

    @override
    def merge(self, mix: Sequence[WeightedTensors]) -> MergedAdapter:
        """Build one LoRA of all ranks at the same scale, with A stacked and weighted B side by side."""
        tensors: Tensors = {}
        for module in self.target_modules(mix[0].tensors):
            a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
            tensors[a] = torch.cat([part.tensors[a] for part in mix], -2)
            tensors[b] = torch.cat([part.weight * part.tensors[b] for part in mix], -1)
        return MergedAdapter(tensors, self.options_of(tensors))

    @override
    def weight_delta(self, adapter: MergedAdapter, module: str, layer: nn.Module) -> Tensors:
        """Return `scale·B·A`."""
        a, b = (adapter.tensors[f"{module}.{name}"].double() for name in LoRA.module_tensors)
        return {"weight": b @ a * options_of(adapter).scale}

    @override
    def peft_config(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> dict[str, Any]:
        alpha = adapter.options["alpha"]
        rslora = {"use_rslora": True} if adapter.options.get("scaling") == "rslora" else {}
        return {
            "peft_type": "LORA",
            **peft_target_modules(backbone, self.target_modules(adapter.tensors)),
            "r": adapter.options["r"],
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "init_lora_weights": True,
            **rslora,
        }

    @override
    def peft_tensors(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> Tensors:
        """Name and shape experts' tensors as peft does: its wrappers of one module's tensors lie inside one another."""
        modules, tensors = self.target_modules(adapter.tensors), dict(adapter.tensors)
        for module in [module for module in modules if module in backbone.experts]:
            inside = module.rpartition(".")[0]
            of_module = [f"{inside}.{name}" for name, _ in backbone.module(inside).named_parameters(recurse=False)]
            outer = [name for name in of_module[of_module.index(module) + 1 :] if name in modules]
            a, b = (tensors.pop(f"{module}.{name}") for name in LoRA.module_tensors)
            place = ".".join([inside, *["base_layer"] * len(outer)])
            tensors[f"{place}.lora_A.weight"] = a.flatten(0, 1)
            tensors[f"{place}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
        return super().peft_tensors(backbone, MergedAdapter(tensors, adapter.options), task_type)

    @override
    def read_initial(self, source: str, backbone: Backbone) -> Tensors:
        """Read a folder in peft's layout, or a file that `silotune import` wrote."""
        if self._options.init == "pissa":
            raise InputError(
                "start: a run starts as this LoRA or, with tuner.init=pissa, as the weight's; leave one out"
            )
        path = Path(source)
        initial = read_peft_lora(path, backbone) if path.is_dir() else unpack(path)
        expected = self.init(backbone, [], torch.Generator().manual_seed(0))
        return initial.matched(source, self._options.r, self._options.standard_alpha, expected)

    @override
    def pack_initial(self, tensors: Tensors) -> bytes:
        return StartAdapter(tensors, self._options.r, self._options.standard_alpha, self._options.sites).pack()

    @property
    def _options(self) -> LoRAOptions:
        return cast(LoRAOptions, self.options)


# -- the start of A and B ----------------------------------------------------------------------------------------------


def _uniform(inputs: int, outputs: int, rank: int, draws: torch.Generator) -> Factors:
    """Draw A uniform in ±1/√in, and B of zeros, as in LoRA's authors' code and in peft."""
    return uniform(draws, 1 / math.sqrt(inputs), rank, inputs), torch.zeros(outputs, rank)


def _orthogonal(inputs: int, outputs: int, rank: int, draws: torch.Generator) -> Factors:
    """Draw nonzero A and B with B·A = 0, as peft does for `init_lora_weights="orthogonal"`.

    Both are normal draws along orthogonal directions, divided by 10. The directions are the same in every part, so that
    B·A is zero also where A and B belong to different parts.
    """
    directions = torch.linalg.qr(torch.randn(rank, rank, generator=derived_generator(0, "orthogonal start", rank)))[0]
    a = torch.randn(inputs, rank // 2, generator=draws) @ directions[0::2]
    b = torch.randn(outputs, rank // 2, generator=draws) @ directions[1::2]
    return a.T.contiguous() / 10, b / 10


INITS: dict[str, Callable[[int, int, int, torch.Generator], Factors]] = {
    "uniform": _uniform,
    "orthogonal": _orthogonal,
}
"""Value of `tuner.init` → a function of width in, width out, rank and generator; of `pissa`: `principal_factors`."""


def principal_factors(backbone: Backbone, module: str, rank: int, device: torch.device, option: str) -> Factors:
    """Return `√Σ·Vᵀ` and `U·√Σ` of the `rank` largest singular values of a module's weight W = U·Σ·Vᵀ, float32.

    PiSSA (Meng et al. 2024, eqs. 2 and 3). They are computed once for a backbone and a device. The largest entry of
    each row of Vᵀ is positive, so that machines agree on signs. Quantized weights are refused in the name of a tuner's
    option (`init=pissa`).
    """
    if backbone.quantization != NONE:
        raise InputError(
            f"tuner.{option}: takes singular vectors of weights that backbone.quantization={backbone.quantization} "
            f"rounds; allowed: backbone.quantization=none, or another {option.partition('=')[0]}"
        )

    def made() -> Factors:
        layer = backbone.module(module)
        if rank > (most := min(layer_widths(layer))):
            raise InputError(f"tuner.r: {rank} singular values of {module}, which has {most}; allowed: up to that")
        a, b = _principal(layer_weight(layer).detach().float(), rank)
        return a.to(device), b.to(device)

    return backbone.constant(("principal", module, rank, device), made)


def _principal(weight: Tensor, rank: int) -> Factors:
    u, values, vh = torch.linalg.svd(weight, full_matrices=False)
    u, values, vh = u[:, :rank], values[:rank].sqrt(), vh[:rank]
    largest = vh.gather(1, vh.abs().argmax(1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0)
    return (signs * vh * values.unsqueeze(1)).contiguous(), (u * signs.T * values).contiguous()
