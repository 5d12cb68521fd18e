"""Choose the device and precision that `auto` means on this machine, and read or set how it uses its memory."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

import torch

from silotune.errors import InputError


def resolve_device(name: str) -> torch.device:
    """Return the device of a value of the key `device`; `auto` is CUDA if the machine has it, else the CPU."""
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

    Without a device, it is the one that `auto` chooses.
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


GIB = 2**30

_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The memory limit of a container."""


def total_memory(device: torch.device) -> int:
    """Return a device's whole memory in bytes; free memory could differ on resume, and lead to other bits."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return _within_limit(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def free_memory(device: torch.device) -> int:
    """Return the bytes that a device has left for this process."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    system = Path("/proc/meminfo")
    if not system.exists():
        return total_memory(device)
    lines = system.read_text(encoding="utf-8").splitlines()
    return _within_limit(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))


def _within_limit(memory: int) -> int:
    limit = _LIMIT.read_text(encoding="utf-8").strip() if _LIMIT.is_file() else "max"
    return min(memory, int(limit)) if limit.isdecimal() else memory


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's malloc.h."""

TRIM_BYTES = 2**30
"""Free bytes kept at the top of the heap: more than one step of a small backbone allocates."""

_MMAP_BYTES = 2**25
"""Blocks of at least 32 MiB are mapped on their own: glibc's upper limit of the setting."""


@cache
def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory for the next batch, once per process.

    It returns large blocks to the system when they are freed, and the system hands the pages out again one by one,
    zeroed: without this setting, a tenth of a training step's seconds is spent on page faults.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, TRIM_BYTES)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)
