"""`resolve_device` and `resolve_precision`: what `auto` (or a named device) means on this machine."""

from __future__ import annotations

import torch

from silotune.errors import InputError


def resolve_device(name: str) -> torch.device:
    """Return the device of a value of the key `device`; `auto` is CUDA if the machine has it, else the CPU.

    Args:
        name: `auto`, `cpu`, `cuda` (the process's current GPU), `cuda:N` or `mps`.

    Raises:
        InputError: if this machine does not have the device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = available_devices()
    if name not in available:
        raise InputError(f"device={name}: this machine does not have it; allowed here: auto, {', '.join(available)}")
    return torch.device(name)


def available_devices() -> list[str]:
    """Return the values of the key `device`, other than `auto`, that this machine can run."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda = ["cuda", *(f"cuda:{index}" for index in range(gpus))] if gpus else []
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def resolve_precision(precision: str, device: torch.device | None = None) -> str:
    """Resolve `auto` to bf16 if the device's hardware has it, else to fp32; other values are returned as they are.

    Args:
        precision: a value of the key `precision`.
        device: where the backbone runs; None: the device that `auto` chooses.
    """
    if precision != "auto":
        return precision
    kind = (device or resolve_device("auto")).type
    if kind == "cuda":  # GPUs without bf16 emulate it slowly
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if kind != "cpu":
        return "fp32"
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return "bf16" if has_bf16() or has_amx() else "fp32"
