"""`total_memory` and `free_memory` of a device, within the limit of a container."""

from __future__ import annotations

import os
from pathlib import Path

import torch

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
