"""`require_room_for_weights` refuses a backbone larger than free memory; sizes of stored and linear weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from silotune.errors import InputError
from silotune.models.backbone.fingerprint import read_header

GIB = 2**30

_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The memory limit of a container."""

_QUANTIZED_BYTES = {"int8": 1.0, "int8-torchao": 1.0, "nf4": 0.5625}
"""Bytes of a quantized number: nf4 has 4 bits, and a float32 scale for 64 of them."""

_NOT_QUANTIZED = ("embed", "lm_head", "wte", "shared.weight", "predictions")
"""Parts of the names of matrices that quantization leaves as they are: embeddings and language-model heads."""


def free_memory(device: torch.device) -> int:
    """Return the bytes that a device has left for this process."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    system = Path("/proc/meminfo")
    if system.exists():
        lines = system.read_text(encoding="utf-8").splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    limit = _LIMIT.read_text(encoding="utf-8").strip() if _LIMIT.is_file() else "max"
    return min(free, int(limit)) if limit.isdecimal() else free


def stored_shapes(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Return tensor's name → shape, from the headers of safetensors files alone; see `read_header`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with path.open("rb") as file:
            header = read_header(file)
        shapes |= {name: tuple(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
    return shapes


def weight_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, quantization: str = "none") -> int:
    """Return the bytes that weights take once they are loaded.

    Args:
        shapes: tensor's name → shape.
        dtype: type of all that is not quantized.
        quantization: as `backbone.quantization`.
    """
    total = 0.0
    for name, shape in shapes.items():
        quantized = len(shape) == 2 and not any(part in name for part in _NOT_QUANTIZED)
        total += prod(shape) * (_QUANTIZED_BYTES.get(quantization, dtype.itemsize) if quantized else dtype.itemsize)
    return int(total)


def require_room_for_weights(
    name: str, files: Sequence[Path], dtype: torch.dtype, device: torch.device, quantization: str, trained: bool
) -> None:
    """Refuse a backbone whose weights alone are larger than the device's free memory.

    Args:
        name: the backbone's name, for the message.
        files: its weight files; where there are none, nothing is known and nothing refused.
        dtype: type of the loaded weights.
        device: where they will be.
        quantization: as `backbone.quantization`.
        trained: whether the weights themselves train, so that they stay in float32.

    Raises:
        InputError: naming both sizes, and what would fit.
    """
    shapes, free = stored_shapes(files), free_memory(device)
    needed = weight_bytes(shapes, dtype, quantization)
    if needed <= free:
        return
    smaller: dict[str, int] = {}
    if not trained:
        smaller["precision=bf16"] = weight_bytes(shapes, torch.bfloat16)
        smaller["backbone.quantization=int8"] = weight_bytes(shapes, torch.bfloat16, "int8")
        smaller["backbone.quantization=nf4"] = weight_bytes(shapes, torch.bfloat16, "nf4")
    fitting = [f"{words} ({size / GIB:.1f} GiB)" for words, size in smaller.items() if size <= free and size < needed]
    smallest = f"; the smallest is {min(smaller.values()) / GIB:.1f} GiB" if smaller else "; tuner=full keeps float32"
    remedy = f"what would fit: {', '.join(fitting)}" if fitting else f"no smaller precision of it would fit{smallest}"
    raise InputError(
        f"backbone: the weights of {name!r} take {needed / GIB:.1f} GiB, and {device} has {free / GIB:.1f} GiB free; "
        f"{remedy}"
    )


def linear_weights(base: nn.Module) -> int:
    """Count the weights of a transformer's linear layers, quantized or not."""
    return sum(map(_weights_of_linear, base.modules()))


def _weights_of_linear(module: Any) -> int:
    if hasattr(module, "in_features"):  # quantized weights have other shapes
        return int(module.in_features * module.out_features)
    weight = None if isinstance(module, nn.Embedding) else getattr(module, "weight", None)
    return weight.numel() if isinstance(weight, Tensor) and weight.dim() == 2 else 0
