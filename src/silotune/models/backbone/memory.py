"""`require_room_for_weights` refuses a backbone whose weights are larger than the free memory of its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from silotune.errors import InputError
from silotune.models.backbone.device import GIB, free_memory
from silotune.models.backbone.fingerprint import read_header
from silotune.models.backbone.quantization import NONE, weight_bytes


def stored_values(files: Sequence[Path]) -> int:
    """Count the values of all tensors in safetensors files, from their headers alone; see `read_header`."""
    total = 0
    for path in files:
        with path.open("rb") as file:
            header = read_header(file)
        total += sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return total


def require_room_for_weights(
    name: str,
    files: Sequence[Path],
    shapes: Callable[[], Any],
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    quantization: str,
    trained: bool,
) -> None:
    """Refuse a backbone whose weights alone are larger than the device's free memory.

    Args:
        name: the backbone's name, for the message.
        files: its weight files; where there are none, nothing is known and nothing refused.
        shapes: makes the model without data, if the files could be too large: they may hold a head that nobody reads.
        dtype: type of the loaded weights.
        devices: where they will be.
        quantization: as `backbone.quantization`.
        trained: whether the weights themselves train, so that they stay in float32.
    """
    free = sum(map(free_memory, devices))
    if stored_values(files) * dtype.itemsize <= free:
        return
    model = shapes()
    needed = weight_bytes(model, quantization, dtype.itemsize)
    if needed <= free:
        return
    smaller: dict[str, int] = {}
    if not trained:
        smaller["precision=bf16"] = weight_bytes(model, NONE, torch.bfloat16.itemsize)
        for kind in ("int8", "nf4"):
            smaller[f"backbone.quantization={kind}"] = weight_bytes(model, kind, torch.bfloat16.itemsize)
    fitting = [f"{words} ({size / GIB:.1f} GiB)" for words, size in smaller.items() if size <= free and size < needed]
    smallest = f"; the smallest is {min(smaller.values()) / GIB:.1f} GiB" if smaller else "; tuner=full keeps float32"
    remedy = f"what would fit: {', '.join(fitting)}" if fitting else f"no smaller precision of it would fit{smallest}"
    raise InputError(
        f"backbone: the weights of {name!r} take {needed / GIB:.1f} GiB, and {' and '.join(map(str, devices))} "
        f"{'has' if len(devices) == 1 else 'have'} {free / GIB:.1f} GiB free; {remedy}"
    )
