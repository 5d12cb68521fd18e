"""Any low-rank adapter as one plain LoRA of the rank that is asked for, as servers of language models read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from silotune.core.tensors import Tensors
from silotune.errors import InputError, needs
from silotune.interop.selection import ExportSelection
from silotune.methods.lora_products import truncated
from silotune.models.tuners.base import MergedAdapter, WeightedTensors
from silotune.models.tuners.loha import LoHa
from silotune.models.tuners.lora import LoRA, options_of
from silotune.models.tuners.vera import VeRA

SERVERS = ("vllm", "sglang")

_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`."""

_MODULES = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
)
"""Last words of the modules at which vLLM and SGLang load a LoRA."""


def as_lora(selection: ExportSelection, program: str, rank: int | None) -> tuple[ExportSelection, float]:
    """Return a selection whose adapter is one plain LoRA, and the error of its products.

    That is `‖ΔW − scale·B·A‖ / ‖ΔW‖` over all modules (Frobenius norm); 0 where nothing is cut off. Without a largest
    rank, it is that of the adapter; of DoRA and LoHa the run's own.
    """
    tuner, adapter, backbone = selection.tuner, selection.adapter, selection.model.context.backbone
    if selection.word == "merged" or not isinstance(tuner, LoRA | VeRA | LoHa):
        what = "--part merged" if selection.word == "merged" else f"tuner={tuner.name}"
        raise InputError(
            f"export: {program} reads adapters of lora, dora, vera and loha alone, not {what}; export --part merged "
            "without --for, for a model's folder that vLLM and SGLang open, and llama.cpp's convert_hf_to_gguf.py reads"
        )
    modules = tuner.target_modules(adapter.tensors)
    if experts := backbone.experts.intersection(modules):
        raise InputError(f"export: {program} takes no adapter of experts ({min(experts)}); export --part merged")
    if type(tuner) is LoRA and (rank is None or rank >= adapter.options["r"]):
        options = options_of(adapter)
        return _replaced(selection, adapter.tensors, options.r, options.standard_alpha), 0.0
    tensors: Tensors = {}
    whole = low_rank = 0.0
    products = {module: _product(selection, module) for module in modules}
    width = max(right.shape[0] for _, right in products.values())
    rank = min(rank or (width if isinstance(tuner, VeRA) else int(adapter.options["r"])), width)
    for module, (left, right) in products.items():
        b, a = truncated(left, right, rank)
        whole += float((left.T @ left * (right @ right.T)).sum())
        low_rank += float(b.square().sum())  # the rows of A are orthonormal
        a_name, b_name = (f"{module}.{name}" for name in LoRA.module_tensors)
        tensors |= {a_name: a.float().contiguous(), b_name: b.float().contiguous()}
    error = max(0.0, 1 - low_rank / whole) ** 0.5 if whole else 0.0
    return _replaced(selection, tensors, rank, float(rank)), error if error > 1e-7 else 0.0  # float64's own


def _replaced(selection: ExportSelection, tensors: Tensors, rank: int, alpha: float) -> ExportSelection:
    return replace(selection, tuner=LoRA(), adapter=MergedAdapter(tensors, {"r": rank, "alpha": alpha}))


def _product(selection: ExportSelection, module: str) -> tuple[Tensor, Tensor]:
    """Return two factors of a module's change of weights, shapes (out, k) and (k, in), float64."""
    tuner, adapter = selection.tuner, selection.adapter
    if type(tuner) not in (LoRA, VeRA):
        delta = tuner.weight_delta(adapter, module, selection.model.context.backbone.module(module))["weight"]
        return delta, torch.eye(delta.shape[1], dtype=delta.dtype)
    is_lora = type(tuner) is LoRA
    tensors = adapter.tensors if is_lora else tuner.merge([WeightedTensors(adapter.tensors, 1.0)]).tensors
    a, b = (tensors[f"{module}.{name}"].double() for name in LoRA.module_tensors)
    return b * (options_of(adapter).scale if is_lora else 1.0), a


def server_rank(about: Mapping[str, Any]) -> int:
    """Return the `--max-lora-rank` that a server needs for an export, whose `export.json` is given."""
    rank = int(about["tuner"]["r"])
    return min(allowed for allowed in _VLLM_RANKS if allowed >= rank) if about["for"] == "vllm" else rank


def check_served(selection: ExportSelection, program: str) -> None:
    """Refuse a LoRA that vLLM or SGLang does not load, by their published rules."""
    head, adapter = selection.model.context.head, selection.adapter
    if head.model_class != "AutoModelForCausalLM" or selection.model.context.backbone.base.config.is_encoder_decoder:
        raise InputError(
            f"export: {program} writes answers, and head={head.name} has none; allowed: lm, dpo; or --for onnx"
        )
    other = {module.rpartition(".")[2] for module in selection.tuner.target_modules(adapter.tensors)} - _MODULES
    if other:
        raise InputError(f"export: {program} loads no LoRA at {', '.join(sorted(other))}; export --part merged")
    if program == "vllm" and adapter.options["r"] > _VLLM_RANKS[-1]:
        raise InputError(
            f"export: vllm takes ranks up to {_VLLM_RANKS[-1]}, this LoRA has {adapter.options['r']}; --rank"
        )


GGUF_FILE, GGUF_PROGRAMS = "adapter.gguf", ("llama.cpp", "ollama")


class Family(NamedTuple):
    """A family's name in GGUF files, and whether its files have rows of queries and keys in another order."""

    architecture: str
    permuted: bool = False


FAMILIES = {
    "llama": Family("llama", permuted=True),
    "mistral": Family("llama", permuted=True),
    "smollm3": Family("smollm3", permuted=True),
    "granite": Family("granite", permuted=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma": Family("gemma"),
    "gemma2": Family("gemma2"),
    "gemma3_text": Family("gemma3"),
    "phi3": Family("phi3"),
}
"""`config.model_type` of transformers → the family in llama.cpp, whose converter has the same table."""


def check_family(selection: ExportSelection) -> None:
    """Refuse a LoRA that llama.cpp does not read."""
    backbone, head = selection.model.context.backbone, selection.model.context.head
    if head.model_class != "AutoModelForCausalLM" or backbone.base.config.is_encoder_decoder:
        raise InputError(f"export: llama.cpp writes answers, and head={head.name} has none; allowed: lm, dpo")
    if backbone.model_type not in FAMILIES:
        raise InputError(
            f"export: adapters for llama.cpp are known of {', '.join(FAMILIES)}, not of {backbone.model_type}; export "
            "without --for, and convert the folder with llama.cpp's convert_lora_to_gguf.py"
        )


def write_gguf(path: Path, selection: ExportSelection) -> None:
    """Write an adapter that `check_family` allows, in float32."""
    with needs("export: GGUF files need the package gguf", "gguf"):
        import gguf
    backbone, adapter = selection.model.context.backbone, selection.adapter
    family, config = FAMILIES[backbone.model_type], backbone.base.config
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(architecture, backbone.blocks)
    writer: Any = gguf.GGUFWriter(path, family.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapter.options["alpha"])
    for module in selection.tuner.target_modules(adapter.tensors):
        name = names.get_name(f"model.{module}")
        if name is None:
            raise InputError(f"export: llama.cpp's {family.architecture} has no tensor for {module}")
        a, b = (adapter.tensors[f"{module}.{matrix}"] for matrix in LoRA.module_tensors)
        if family.permuted and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            # rows of shape (heads · width, r), from halves that rotate together to neighbors that do
            b = b.reshape(int(heads), 2, -1, b.shape[1]).transpose(1, 2).reshape(b.shape)
        writer.add_tensor(f"{name}.weight.lora_a", a.contiguous().numpy())
        writer.add_tensor(f"{name}.weight.lora_b", b.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
