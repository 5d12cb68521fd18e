"""Load the linear layers of a backbone in 8 or 4 bits, with bitsandbytes or torchao."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from silotune.errors import InputError, needs

NONE = "none"
"""The value of `backbone.quantization` for weights as they are stored."""

_BLOCK = 64
"""Weights of a 4-bit layer that share a scale (Dettmers et al. 2023, section 3)."""


@dataclass(frozen=True)
class Quantization:
    """A kind of quantization.

    Args:
        library: the package that has it; the extra `quantization` installs it.
        settings: data type of the computations → transformers' quantization configuration.
        layer_bytes: output and input width of a layer → bytes of its weight and scales.
        transposed: whether GPT-2's linear layers, which store their weight transposed, are quantized too.
    """

    library: str
    settings: Callable[[torch.dtype], Any]
    layer_bytes: Callable[[int, int], int]
    transposed: bool = True


def _int8(_: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return cast(Any, BitsAndBytesConfig)(load_in_8bit=True)


def _nf4(dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    make = cast(Any, BitsAndBytesConfig)
    return make(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _int8_torchao(_: torch.dtype) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))


QUANTIZATIONS = {
    # LLM.int8() (Dettmers et al. 2022): int8 weights, and int8 activations except in columns with outliers
    "int8": Quantization("bitsandbytes", _int8, lambda rows, columns: rows * columns + 4 * rows),
    # QLoRA's data type (Dettmers et al. 2023), without its second quantization of the scales
    "nf4": Quantization(
        "bitsandbytes",
        _nf4,
        lambda rows, columns: math.ceil(rows * columns / 2) + 4 * math.ceil(rows * columns / _BLOCK),
    ),
    # int8 weights alone, one scale and zero point per output
    "int8-torchao": Quantization(
        "torchao", _int8_torchao, lambda rows, columns: rows * columns + 5 * rows, transposed=False
    ),
}
"""Value of `backbone.quantization` → its kind."""


def resolve_quantization(name: str, device: torch.device) -> str:
    """Resolve `auto` to int8 on a CUDA device and to none elsewhere; other values are returned as they are."""
    if name != "auto":
        return name
    return "int8" if device.type == "cuda" else NONE


def quantized_loading(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that load a model quantized, onto its device."""
    library = QUANTIZATIONS[name].library
    logging.getLogger(library).setLevel(logging.ERROR)
    needed = (library, "accelerate") if library == "bitsandbytes" else (library,)
    for package in needed:
        with needs(f"backbone.quantization={name}: needs {package}", "quantization"):
            importlib.import_module(package)
    return {"quantization_config": QUANTIZATIONS[name].settings(dtype), "device_map": {"": device}}


def refuse_stored_quantization(name: str, config: Any) -> None:
    """Refuse a checkpoint whose weights are stored quantized: the tuned parts could not be merged into them."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    raise InputError(
        f"backbone: {name!r} is stored quantized ({getattr(method, 'value', method) or 'unknown method'}); give the "
        "checkpoint it was made from, with backbone.quantization=int8, nf4 or int8-torchao"
    )


def settle(model: nn.Module, backbone: str, quantization: str) -> None:
    """Disable the CPU weight packing that loses gradients, and free int8 inputs that frozen weights never need."""
    layers = [module for module in model.modules() if is_quantized(module)]
    if not layers:
        raise InputError(
            f"backbone.quantization={quantization}: {backbone!r} has no linear layer that "
            f"{QUANTIZATIONS[quantization].library} can quantize; allowed: none"
            + ("" if QUANTIZATIONS[quantization].transposed else ", int8, nf4")
        )
    if quantization == "nf4":
        for layer in layers:
            # On CPUs with AVX512-BF16 the first forward without gradient would pack the weights for a kernel without
            # backward pass, and training after an evaluation would lose gradients without a word.
            cast(Any, layer).support_avx512bf16_for_cpu = False
    if quantization == "int8":
        for layer in layers:
            layer.register_forward_hook(_release_input)


def _release_input(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
    """Free the input that an int8 layer keeps for the gradient of its weight, which is frozen.

    It is an attribute of the graph's node, which gradient checkpointing would not free either.
    """
    node: Any = output.grad_fn
    if hasattr(node, "tensors") and hasattr(node, "tensor_states"):
        node.tensors = (None, None, None)


def is_quantized(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose weight is stored quantized."""
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and type(weight).__name__ in ("Int8Params", "Params4bit", "Int8Tensor")


def quantized_shapes(model: Any, name: str) -> dict[str, tuple[int, int]]:
    """Find the layers of a plain model that loading it quantized would replace.

    transformers leaves out the output embeddings, what is tied to the embeddings, and layers that a family keeps in
    float32 (T5's `wo`).

    Returns:
        Module name → output and input width.
    """
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    left_out = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    ending = "" if QUANTIZATIONS[name].library == "bitsandbytes" else ".weight"  # torchao asks for the weight's name
    shapes = {}
    for path, module in model.named_modules():
        if not should_convert_module(f"{path}{ending}", left_out):
            continue
        if type(module) is nn.Linear:
            shapes[path] = (module.out_features, module.in_features)
        elif type(module).__name__ == "Conv1D" and QUANTIZATIONS[name].transposed:
            columns, rows = module.weight.shape
            shapes[path] = (int(rows), int(columns))
    return shapes


def weight_bytes(model: Any, name: str, value_bytes: int) -> int:
    """Compute the bytes of a model's weights from their shapes.

    The model has data or shapes alone; `value_bytes` are those of a weight that is not quantized.
    """
    total: int = value_bytes * sum(parameter.numel() for parameter in model.parameters())
    if name == NONE:
        return total
    layer_bytes = QUANTIZATIONS[name].layer_bytes
    shapes = quantized_shapes(model, name).values()
    return total + sum(layer_bytes(*shape) - value_bytes * math.prod(shape) for shape in shapes)


def linear_weights(base: nn.Module) -> int:
    """Count the weights of a transformer's linear layers, quantized or not."""
    return sum(map(_weights_of_linear, base.modules()))


def _weights_of_linear(module: Any) -> int:
    if hasattr(module, "in_features"):  # quantized weights have other shapes
        return int(module.in_features * module.out_features)
    weight = None if isinstance(module, nn.Embedding) else getattr(module, "weight", None)
    return weight.numel() if isinstance(weight, Tensor) and weight.dim() == 2 else 0
