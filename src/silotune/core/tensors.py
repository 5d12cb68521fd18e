"""Parts: named sets of tensors, and their scope. This is the description of a federated state.

A part's tensors are a flat `dict[str, Tensor]`; a state is `{part name: tensors}`. Engines, checkpoints, messages and
exports all speak this form. The scope alone decides what leaves a silo.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    pass


_LINE = 64  # bytes


Tensors = dict[str, Tensor]

State = dict[str, Tensors]


def flatten(state: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
    """`{part: {tensor: …}}` as `{"part/tensor": …}`."""
    return {f"{part}/{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}


def unflatten(tensors: Mapping[str, Tensor]) -> State:
    """The inverse of `flatten`; part names hold no slash."""
    state: State = {}
    for key, tensor in tensors.items():
        part, name = key.split("/", 1)
        state.setdefault(part, {})[name] = tensor
    return state


def copy(tensors: Mapping[str, Tensor]) -> Tensors:
    """An independent copy without gradient."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def compact(tensors: Mapping[str, Tensor]) -> Tensors:
    """A copy on the CPU in one block of memory per dtype, each tensor at a multiple of 64 bytes, as PyTorch puts them.

    Hundreds of small tensors a silo otherwise leave a fifth of the memory in holes between them.
    """
    found = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    copies: Tensors = {}
    for dtype in {tensor.dtype for tensor in found.values()}:
        step = _LINE // dtype.itemsize
        own = {name: tensor for name, tensor in found.items() if tensor.dtype is dtype}
        lengths = [-(-tensor.numel() // step) * step for tensor in own.values()]
        pieces = torch.split_with_sizes(torch.zeros(sum(lengths), dtype=dtype), lengths)
        places = [piece[: t.numel()].view(t.shape) for piece, t in zip(pieces, own.values(), strict=True)]
        torch._foreach_copy_(places, list(own.values()))
        copies |= zip(own, places, strict=True)
    return {name: copies[name] for name in found}


def count_parameters(tensors: Mapping[str, Tensor]) -> int:
    """The number of parameters."""
    return sum(tensor.numel() for tensor in tensors.values())


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes, in name order."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
