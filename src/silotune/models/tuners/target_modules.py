"""Find the linear layers, and experts, that `tuner.sites` names, with their widths, weights and names in peft."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from silotune.errors import InputError
from silotune.models.backbone.architectures import TARGET_FIELDS
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.quantization import is_quantized
from silotune.models.tuners.base import TunerOptions


def parse_words(value: object) -> object:
    """Turn `"a, b"` or a list of words into a tuple of words."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not words or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"a list of {', '.join(TARGET_FIELDS)}, or of patterns of module names, is needed")
    words = tuple(word.strip() for word in words)
    for word in words:
        similar = [] if word in TARGET_FIELDS else difflib.get_close_matches(word, TARGET_FIELDS, n=1, cutoff=0.85)
        if similar:
            raise ValueError(
                f"unknown site {word!r} (did you mean {similar[0]!r}?); allowed: {', '.join(TARGET_FIELDS)}, or "
                "patterns of module names"
            )
    return words


class TargetModuleOptions(TunerOptions):
    """The option of tuners that act at modules of the backbone."""

    sites: tuple[str, ...] = Field(
        description="fields of the family's table (query, key, value, …) or patterns of module names, comma-separated"
    )
    blocks: str | None = Field(
        default=None,
        pattern=r"^last:[1-9]\d*$",
        description="`last:k`: of `sites` only those in the last k blocks (of each stack), whose steps take less time, "
        "with `cache=frozen-prefix` far less. Unset: all.",
    )

    @field_validator("sites", mode="before")
    @classmethod
    def _words(cls, sites: object) -> object:
        return parse_words(sites)

    def modules(
        self, backbone: Backbone, tuner: str, words: Sequence[str] | None = None, experts: bool = False
    ) -> list[str]:
        """Find the linear layers, and tensors of experts, that words name in the chosen blocks.

        The search is cached per backbone, since every silo's part asks for it.

        Args:
            backbone: the backbone whose base transformer is searched.
            tuner: the tuner's name, for messages.
            words: instead of `sites`; each a field of the family's table, a full module name, the end of one (`c_attn`,
                `attn.c_attn`), or a pattern with `*`.
            experts: whether the tuner can change tensors of experts; if not, words that name them are refused.

        Returns:
            Full names, each once: those of fields block by block, then those of patterns.
        """
        key = tuple(words or self.sites), tuner, experts
        return self.chosen(backbone, backbone.constant(("modules", *key), lambda: _search(backbone, *key)))

    def chosen(self, backbone: Backbone, modules: Sequence[str]) -> list[str]:
        """Return those of the modules that are in the chosen blocks, in order."""
        if self.blocks is None:
            return list(modules)
        if backbone.known_architecture is None:
            raise InputError(
                f"tuner.blocks: {backbone.model_type} is no known family; name its layers, e.g. tuner.sites=layers.11.*"
            )
        last, inside = int(self.blocks.removeprefix("last:")), []
        for stack in backbone.known_architecture.stacks:
            count = len(cast(nn.ModuleList, backbone.base.get_submodule(stack.blocks)))
            if last > count:
                raise InputError(
                    f"tuner.blocks: {self.blocks}, and {stack.blocks} has {count}; allowed: last:1 to {count}"
                )
            inside += [f"{stack.blocks}.{block}." for block in range(count - last, count)]
        if not (selection := [name for name in modules if name.startswith(tuple(inside))]):
            raise InputError(
                f"tuner.blocks: no module of tuner.sites lies in {self.blocks}; e.g. {modules[0]} does not"
            )
        return selection


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or GPT-2's transposed form of one."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def layer_widths(module: nn.Module) -> tuple[int, int]:
    """Return a linear layer's input and output width; not from the weight, which a quantized layer stores packed."""
    if is_transposed(module):
        rows, columns = cast(Tensor, module.weight).shape
        return int(rows), int(columns)
    linear = cast(nn.Linear, module)
    return linear.in_features, linear.out_features


def expert_widths(backbone: Backbone, name: str) -> tuple[int, int, int]:
    """Return the number of experts whose layer a tensor holds, and the layer's input and output width."""
    experts, outputs, inputs = backbone.base.get_parameter(name).shape
    return (experts, outputs, inputs) if experts_are_transposed(backbone.base, name) else (experts, inputs, outputs)


def experts_are_transposed(base: nn.Module, name: str) -> bool:
    """Return whether a tensor of the base transformer holds experts' weights as (in, out), as transformers notes it."""
    return bool(getattr(base.get_submodule(name.rpartition(".")[0]), "is_transposed", False))


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear layer, whose weight has shape (in, out)."""
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Conv1d)  # by name: no import of transformers


def linear_weight(module: nn.Module) -> Tensor:
    """Return a linear layer's weight as (out, in), even if the layer stores it transposed."""
    weight = cast(Tensor, module.weight)
    return weight.t() if is_transposed(module) else weight


@torch.no_grad()
def layer_weight(module: nn.Module) -> Tensor:
    """Return a linear layer's weight as (out, in) with the values that its forward uses, dequantized if necessary.

    For a quantized layer it is computed at each call, from the layer's outputs for the unit vectors.
    """
    if not is_quantized(module):
        return linear_weight(module)
    inputs, _ = layer_widths(module)
    answers = module(torch.eye(inputs, device=cast(Tensor, module.weight).device))
    return cast(Tensor, answers if module.bias is None else answers - module.bias).t()


def peft_target_modules(backbone: Backbone, modules: list[str]) -> dict[str, Any]:
    """Fields of peft's `adapter_config.json` that name the target modules."""
    layers = [module for module in modules if module not in backbone.experts]
    experts = [module for module in modules if module in backbone.experts]
    transposed = {is_transposed(backbone.module(module)) for module in layers}
    return {
        "target_modules": short_names(backbone, layers),
        "fan_in_fan_out": transposed == {True},
        "modules_to_save": None,
        **({"target_parameters": experts} if experts else {}),
    }


def short_names(backbone: Backbone, modules: list[str]) -> list[str]:
    """Return the modules' last words if these name no other module of the backbone, otherwise their full names."""
    all_names = [name for name, _ in backbone.model.named_modules()] + ["pooler.dense"]
    endings = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    matches = [name for name in all_names if name.rpartition(".")[2] in endings]
    return endings if len(matches) == len(modules) else modules


def _search(backbone: Backbone, words: Sequence[str], tuner: str, experts: bool) -> list[str]:
    modules = dict(backbone.base.named_modules())
    linear = [name for name, module in modules.items() if is_linear(module)]
    all_names = {*modules, *backbone.experts}
    fields = [word for word in words if word in TARGET_FIELDS]
    blocks = [
        (stack, block)
        for stack in (backbone.architecture.stacks if fields else ())
        for block in range(len(cast(nn.ModuleList, modules[stack.blocks])))
    ]
    names = [
        name for stack, block in blocks for field in fields for name in stack.modules(field, block) if name in all_names
    ]
    for word in words:
        if word in TARGET_FIELDS:
            matches = [name for stack, block in blocks for name in stack.modules(word, block) if name in all_names]
        else:
            possible = [*linear, *sorted(backbone.experts)]
            matches = [
                name for name in possible if name == word or fnmatchcase(name, word) or name.endswith(f".{word}")
            ]
            names += matches
        if not experts and not backbone.experts.isdisjoint(matches):
            raise InputError(
                f"tuner.sites: {tuner} finds no linear layer for {word!r} in {backbone.model_type}, whose experts are "
                "one tensor; allowed: tuner=lora, which tunes experts, or query, key, value, attention_output"
            )
        if not matches:
            examples = ", ".join(linear[:3])
            raise InputError(
                f"tuner.sites: {tuner} finds no linear layer for {word!r} in {backbone.model_type}; allowed: "
                f"{', '.join(TARGET_FIELDS)} where the family has them, or patterns of module names (such as "
                f"{examples})"
            )
    return list(dict.fromkeys(names))
