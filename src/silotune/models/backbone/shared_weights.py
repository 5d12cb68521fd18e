"""`SharedWeights`: a model's converted tensors in an anonymous file, once for a process and its children (`--workers`).

Weights that stay as they are stored are mapped from their files, and every process that loads them shares the same
pages. Weights that loading converts (another type, merged tensors) would be a copy in every process: `SharedWeights`
holds them once, in an anonymous file that child processes inherit.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from silotune.models.backbone.allocator import release_freed_memory

_ALIGNMENT = 64
"""Bytes to whose multiples tensors are aligned, as PyTorch aligns its own."""

_MAPPED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) .*\.safetensors$")
"""A line of Linux's /proc/self/maps about a weight file."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedWeights:
    """A model's tensors in shared memory; picklable for child processes, while they are started.

    Args:
        file: descriptor of the anonymous file.
        places: tensor's name → its place; tied tensors have one place.
    """

    def __init__(self, file: int, places: dict[str, _Place]) -> None:
        self._file, self._places = file, places
        self._memory = mmap.mmap(file, 0)
        self.tensors: dict[str, Tensor] = {name: self._tensor(place) for name, place in places.items()}

    @classmethod
    def of(cls, model: nn.Module) -> SharedWeights | None:
        """Move a model's tensors into shared memory, one by one; None if all are mapped from files already.

        Args:
            model: on the CPU; its parameters keep their identity and values.
        """
        tensors = model.state_dict()
        if all(map(_from_file(), tensors.values())):
            return None
        places: dict[str, _Place] = {}
        seen: dict[int, _Place] = {}
        end = 0
        for name, tensor in tensors.items():
            if tensor.data_ptr() not in seen:
                seen[tensor.data_ptr()] = _Place(end, tuple(tensor.shape), tensor.dtype)
                end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            places[name] = seen[tensor.data_ptr()]
        file = _anonymous_file()
        os.ftruncate(file, max(end, 1))
        shared = cls(file, places)
        del tensors
        tied: dict[int, Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in tied:
                tied[id(tensor)] = tensor
                shared.tensors[name].copy_(tensor.detach())
                tensor.data = shared.tensors[name]  # the former memory is freed here
        release_freed_memory()
        return shared

    def _tensor(self, place: _Place) -> Tensor:
        number = torch.Size(place.shape).numel()
        if number == 0:
            return torch.empty(place.shape, dtype=place.dtype)
        return torch.frombuffer(self._memory, dtype=place.dtype, count=number, offset=place.offset).view(place.shape)

    def __reduce__(self) -> tuple[Callable[..., SharedWeights], tuple[Any, ...]]:
        return _attach, (reduction.DupFd(self._file), self._places)

    def __del__(self) -> None:
        os.close(self._file)


def _attach(file: Any, places: dict[str, _Place]) -> SharedWeights:
    return SharedWeights(file.detach(), places)


def _anonymous_file() -> int:
    """Return the descriptor of a file without a name: in memory on Linux, else among temporary files."""
    if sys.platform == "linux":
        return os.memfd_create("silotune-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _from_file() -> Callable[[Tensor], bool]:
    """Return a test whether a tensor's bytes are mapped from a weight file; always false where this is not known."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    ranges = [(int(found[1], 16), int(found[2], 16)) for found in map(_MAPPED.match, lines) if found]

    def mapped(tensor: Tensor) -> bool:
        first = tensor.data_ptr()
        return tensor.nbytes == 0 or any(start <= first and first + tensor.nbytes <= end for start, end in ranges)

    return mapped
