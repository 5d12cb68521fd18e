"""Read the LoRA that a run starts with (key `start`), from peft's folder or a file, and check that it fits the tuner.

Every adapter of the method starts as this LoRA, private ones too: mixes whose weights sum to 1 then start as the
imported model.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from silotune.core.files import damage_named, decode_text
from silotune.core.serialization import read_metadata, read_tensors, tensor_bytes
from silotune.core.tensors import Tensors, digest
from silotune.errors import InputError
from silotune.models.backbone.architectures import TARGET_FIELDS
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.target_modules import is_linear, layer_widths

FILE = "start.safetensors"
"""Name of the copy in a run's folder."""

_METADATA = "silotune-start"

START_ALLOWED = "allowed: a folder in peft's layout, a file that `silotune import` wrote, or a finished run"


@dataclass(frozen=True)
class StartAdapter:
    """A LoRA under the backbone's module names, float32.

    Args:
        tensors: `<module>.lora_A.weight` of shape (r, in) and `<module>.lora_B.weight` of shape (out, r).
        r: the rank.
        alpha: the numerator of the scale alpha / r.
        sites: the words of `tuner.sites` that name its modules.
    """

    tensors: Tensors
    r: int
    alpha: float
    sites: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The `key=value` words of a run with such adapters."""
        sites = ",".join(self.sites)
        return ["tuner=lora", f"tuner.r={self.r}", f"tuner.alpha={self.alpha:.10g}", f"tuner.sites={sites}"]

    def pack(self) -> bytes:
        """Serialize as a safetensors file."""
        fields = {"tuner": "lora", "r": self.r, "alpha": self.alpha, "sites": list(self.sites)}
        fields["sha256"] = digest(self.tensors)
        return tensor_bytes(self.tensors, {_METADATA: json.dumps(fields)})

    def matched(self, source: str, r: int, alpha: float, expected: Tensors) -> Tensors:
        """Return the tensors in the order of `expected`, after comparing them with a run's."""
        words = " ".join(self.words[1:])
        if self.r != r:
            raise InputError(f"start: {source} has rank {self.r}, tuner.r is {r}; use {words}")
        if not math.isclose(self.alpha, alpha, rel_tol=1e-6):
            raise InputError(f"start: {source} has alpha {self.alpha:.10g}, tuner.alpha is {alpha}; use {words}")
        for name in [*expected, *self.tensors]:
            if name not in self.tensors or name not in expected:
                here = "a LoRA" if name in self.tensors else "nothing"
                module = name.rpartition(".lora_")[0]
                raise InputError(f"start: {source} has {here} at {module!r}, unlike tuner.sites; use {words}")
            if self.tensors[name].shape != expected[name].shape:
                raise InputError(
                    f"start: {source} has shape {tuple(self.tensors[name].shape)} at {name!r}, this backbone needs "
                    f"{tuple(expected[name].shape)}; it belongs to another base model"
                )
        return {name: self.tensors[name] for name in expected}


def unpack(path: Path) -> StartAdapter:
    """Read a file that `StartAdapter.pack` wrote."""
    try:
        content = path.read_bytes()
        tensors, fields = read_tensors(content), read_metadata(content, _METADATA)
        initial = StartAdapter(tensors, int(fields["r"]), float(fields["alpha"]), tuple(map(str, fields["sites"])))
    except OSError as error:
        raise InputError(f"start: {path} cannot be read ({error.strerror}); {START_ALLOWED}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"start: {path} is not what `silotune import` writes; {START_ALLOWED}") from error
    if fields.get("sha256", sha256 := digest(tensors)) != sha256:
        raise InputError(f"start: {path} is damaged (its tensors are not those of the recorded sha256); import it anew")
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float32 or not torch.isfinite(tensor).all():
            raise InputError(f"start: {path}: tensor {name!r} is not made of finite float32 numbers")
    return initial


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_WRAPPER = "base_model.model."

_HARMLESS = (
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size", "eva_config"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "runtime_config", "modules_to_save"),
    *("r", "lora_alpha", "target_modules", "bias", "use_rslora", "init_lora_weights"),
    *("ensure_weight_tying", "corda_config", "lora_ga_config"),
    *("unsloth_fixed", "unsloth_version", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"),  # of Unsloth and ms-swift
)
"""Keys of a LoRA's configuration that are read here, or that do not affect the output of a saved LoRA."""

HEADS = ("classifier", "pre_classifier", "score", "classification_head", "qa_outputs")
"""Modules that belong to a task: they are left out, as every run trains its own."""

_ALLOWED = "lora_A.weight, lora_B.weight"

_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Initializations of a LoRA that leave the base model's weights unchanged (others subtract from them)."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read a LoRA's `adapter_config.json` and check that it is a plain LoRA of one rank."""
    path = folder / CONFIG
    try:
        config = json.loads(decode_text(path.read_bytes()))
    except OSError as error:
        raise InputError(f"{folder}: no LoRA in peft's layout there ({CONFIG}: {error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({str(error)[:80]})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise InputError(f"{path}: peft_type is {kind!r}; allowed: LORA")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise InputError(f"{path}: r must be a positive whole number (got {rank!r})")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise InputError(f"{path}: lora_alpha must be a positive number (got {alpha!r})")
    for key, value in config.items():
        if key not in _HARMLESS and value not in (None, False, {}, [], ""):
            raise InputError(f"{path}: {key}={value!r} is more than a plain LoRA of one rank; allowed: not set")
    if config.get("bias", "none") != "none":
        raise InputError(f"{path}: bias={config['bias']!r} trains bias terms too; allowed: none")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise InputError(
            f"{path}: init_lora_weights={config['init_lora_weights']!r} changes the base model's weights; allowed: "
            "a LoRA over the pretrained weights (peft converts one when saving)"
        )
    return config


def read_peft_lora(folder: Path, backbone: Backbone) -> StartAdapter:
    """Read a folder that peft wrote; tensors are renamed after the backbone's modules.

    A classifier saved with the LoRA (`modules_to_save`) is left out: heads belong to tasks. Other modules saved with
    it must be as in the backbone: without what was trained there, the LoRA would be another model.
    """
    config = read_config(folder)
    rank, path = int(config["r"]), folder / WEIGHTS
    if not path.is_file() and (folder / "adapter_model.bin").exists():
        raise InputError(f"{folder}: holds adapter_model.bin, a pickle, which is never opened; allowed: {WEIGHTS}")
    with damage_named(path):
        saved = read_tensors(path.read_bytes())
    linear = {name: module for name, module in backbone.base.named_modules() if is_linear(module)}
    beside = {name: tensor for name, tensor in saved.items() if ".lora_" not in name}
    lost = [
        name.removeprefix(_WRAPPER)
        for name, tensor in beside.items()
        if not set(HEADS).intersection(name.split(".")) and not _is_backbones(name, tensor, backbone)
    ]
    if lost:
        raise InputError(
            f"{path}: {', '.join(lost[:4])}{' …' if lost[4:] else ''} beside the LoRA (modules_to_save, or "
            f"save_embedding_layers) would be lost; allowed: {_ALLOWED}. Save without what was not trained; else "
            "merge all into the base model (merge_and_unload, save_pretrained), and give its folder as backbone"
        )
    tensors: Tensors = {}
    for name, tensor in saved.items():
        if name in beside:
            continue
        module_name, _, matrix = name.rpartition(".lora_")
        module_name = _base_name(module_name, linear, path, backbone)
        inputs, outputs = layer_widths(linear[module_name])
        shapes = {"A.weight": (rank, inputs), "B.weight": (outputs, rank)}
        if matrix not in shapes:
            raise InputError(f"{path}: tensor {name!r} is no part of a plain LoRA; allowed: {_ALLOWED}")
        if tuple(tensor.shape) != shapes[matrix]:
            raise InputError(
                f"{path}: tensor {name!r} has shape {tuple(tensor.shape)}; for r={rank} on {backbone.name or 'this'}'s "
                f"{module_name} it must be {shapes[matrix]}"
            )
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise InputError(f"{path}: tensor {name!r} holds values that are no finite numbers")
        tensors[f"{module_name}.lora_{matrix}"] = tensor.float()
    modules = list(dict.fromkeys(name.rpartition(".lora_")[0] for name in tensors))
    if not modules:
        raise InputError(f"{path}: holds no LoRA")
    for module_name in modules:
        for matrix in ("A", "B"):
            if f"{module_name}.lora_{matrix}.weight" not in tensors:
                raise InputError(f"{path}: {module_name} has no lora_{matrix}.weight")
    scale = math.sqrt(rank) if config.get("use_rslora") else 1.0  # alpha/√r there, alpha/r here
    return StartAdapter(tensors, rank, float(config["lora_alpha"]) * scale, site_words(backbone, modules))


def _is_backbones(name: str, tensor: Tensor, backbone: Backbone) -> bool:
    """Return whether a tensor that was saved with the LoRA is as the backbone has it."""
    own = backbone.base.state_dict()
    rest = name.removeprefix(_WRAPPER)
    while rest and rest not in own:
        rest = rest.partition(".")[2]
    return rest in own and own[rest].shape == tensor.shape and bool((own[rest].cpu().float() == tensor.float()).all())


def _base_name(name: str, linear: dict[str, Any], path: Path, backbone: Backbone) -> str:
    """Strip peft's wrapper and the names of enclosing models from a module's name."""
    rest = name.removeprefix(_WRAPPER)
    while rest not in linear:
        _, dot, rest = rest.partition(".")
        if not dot:
            raise InputError(
                f"{path}: tunes {name.removeprefix(_WRAPPER)!r}, which is no linear layer of {backbone.name or 'the'} "
                f"({backbone.model_type}); is this the LoRA's base model?"
            )
    return rest


def site_words(backbone: Backbone, modules: list[str]) -> tuple[str, ...]:
    """Find short words of `tuner.sites` for modules: fields of the family's table if they fit, otherwise full names."""
    rest, words = set(modules), []
    if backbone.known_architecture is not None:
        names = {name for name, _ in backbone.base.named_modules()}
        for field in TARGET_FIELDS:
            members = {
                name
                for stack in backbone.known_architecture.stacks
                for block in range(len(backbone.base.get_submodule(stack.blocks)))
                for name in stack.modules(field, block)
            } & names
            if members and members <= set(modules) and members & rest:
                words.append(field)
                rest -= members
    return (*words, *(module for module in modules if module in rest))
