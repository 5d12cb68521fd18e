"""Write a LoRA as llama.cpp and Ollama read it: an adapter in a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from silotune.errors import InputError
from silotune.interop.selection import ExportSelection
from silotune.models.tuners.lora import LoRA

FILE, PROGRAMS = "adapter.gguf", ("llama.cpp", "ollama")


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
    try:
        import gguf
    except ImportError as error:
        raise InputError("export: GGUF files need the package gguf; pip install 'silotune[gguf]'") from error
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
            is_query = module.endswith("q_proj")
            b = interleaved(b, int(config.num_attention_heads if is_query else config.num_key_value_heads))
        writer.add_tensor(f"{name}.weight.lora_a", a.contiguous().numpy())
        writer.add_tensor(f"{name}.weight.lora_b", b.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Reorder a projection's rows, shape (heads · width, …), from halves that rotate together to neighbors that do."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
