"""The form in which all packages hold tensors (by name, and by part): flattened, joined, hashed, drawn, clipped.

A part's tensors are a flat `dict[str, Tensor]`; a state is `{part name: tensors}`. Engines, checkpoints, messages and
exports all use this form.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

_ALIGNMENT = 64  # bytes, as PyTorch aligns tensors
_SMALL = 65_536  # numbers; copying a larger tensor costs more than a call


Tensors = dict[str, Tensor]

State = dict[str, Tensors]


def flatten(state: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
    """Flatten `{part: {tensor: …}}` to `{"part/tensor": …}`."""
    return {f"{part}/{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}


def unflatten(tensors: Mapping[str, Tensor]) -> State:
    """Invert `flatten`; part names contain no slash."""
    state: State = {}
    for key, tensor in tensors.items():
        part, name = key.split("/", 1)
        state.setdefault(part, {})[name] = tensor
    return state


def detached(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the same tensors as constants: no gradient flows into them."""
    return {name: tensor.detach() for name, tensor in tensors.items()}


def copy(tensors: Mapping[str, Tensor]) -> Tensors:
    """Clone tensors, detached from the graph."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def on_device(tensors: Mapping[str, Tensor], device: torch.device) -> Tensors:
    """Return tensors on a device, detached, in name order: sums over them have the same bits after a resume."""
    return {name: tensor.detach().to(device) for name, tensor in sorted(tensors.items())}


def compact(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copy tensors to the CPU into one block of memory per dtype, each tensor aligned to 64 bytes.

    Separate allocations of hundreds of small tensors per silo would waste a fifth of the memory in gaps.
    """
    on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    copies: Tensors = {}
    for dtype in {tensor.dtype for tensor in on_cpu.values()}:
        unit = _ALIGNMENT // dtype.itemsize
        same_dtype = {name: tensor for name, tensor in on_cpu.items() if tensor.dtype is dtype}
        lengths = [-(-tensor.numel() // unit) * unit for tensor in same_dtype.values()]
        blocks = torch.split_with_sizes(torch.zeros(sum(lengths), dtype=dtype), lengths)
        targets = [piece[: t.numel()].view(t.shape) for piece, t in zip(blocks, same_dtype.values(), strict=True)]
        torch._foreach_copy_(targets, list(same_dtype.values()))
        copies |= zip(same_dtype, targets, strict=True)
    return {name: copies[name] for name in on_cpu}


class JoinedLayout:
    """How the tensors of a state are concatenated: small ones of one dtype together, each large one alone.

    A call for each of hundreds of small tensors costs more than copying them, and freed they leave gaps in memory.

    It joins any tensors with the names, shapes and dtypes of the given ones.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._like = tensors
        small: dict[torch.dtype, list[str]] = {}
        self._groups: list[list[str]] = []
        for name, tensor in tensors.items():
            if tensor.numel() > _SMALL:
                self._groups.append([name])
            else:
                small.setdefault(tensor.dtype, []).append(name)
        self._groups += small.values()

    def join(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the same numbers in few tensors of one dimension; a large tensor is not copied."""
        return [
            tensors[names[0]].reshape(-1)
            if len(names) == 1
            else _flatten_dense_tensors([tensors[name] for name in names])  # type: ignore[no-untyped-call]
            for names in self._groups
        ]

    def split(self, blocks: Sequence[Tensor]) -> Tensors:
        """Invert `join`; the tensors are views of the blocks."""
        tensors: Tensors = {}
        for names, block in zip(self._groups, blocks, strict=True):
            like = [self._like[name] for name in names]
            tensors |= zip(names, _unflatten_dense_tensors(block, like), strict=True)  # type: ignore[no-untyped-call]
        return tensors


def count_parameters(tensors: Mapping[str, Tensor]) -> int:
    """Count the parameters."""
    return sum(tensor.numel() for tensor in tensors.values())


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 over names, dtypes, shapes and bytes, in name order."""
    return digest_of_sorted((name, tensors[name]) for name in sorted(tensors))


def digest_of_sorted(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Compute `digest` of named tensors that come one by one, in name order."""
    sha = hashlib.sha256()
    for name, named in tensors:
        tensor = named.detach().cpu().contiguous()
        sha.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


Norm = Literal["l1", "l2"]

_ROUNDING = 1 + 1e-12  # keeps the norm of the clipped update, summed in float64, at or below the bound


def total_norm(tensors: Iterable[Tensor], norm: Norm) -> float:
    """Compute `Σ|x|` or `√Σx²` over all tensors together, in float64.

    An iterator is consumed one by one.
    """
    if norm == "l1":
        return math.fsum(float(tensor.double().abs().sum()) for tensor in tensors)
    return math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in tensors))


def clipping_factor(norm: float, bound: float) -> float:
    """Return `min(1, C / ‖Δ‖)`, exactly 1 if the norm is within the bound."""
    return 1.0 if norm <= bound else bound / (norm * _ROUNDING)


def clip_to_norm(change: Tensors, bound: float, norm: Norm) -> Tensors:
    """Return `Δ·min(1, C / ‖Δ‖)` in float64, with the norm over all tensors together."""
    change = {name: tensor.double() for name, tensor in change.items()}
    factor = clipping_factor(total_norm(change.values(), norm), bound)
    return change if factor == 1 else {name: tensor * factor for name, tensor in change.items()}


def change_of(before: Tensors, after: Tensors) -> Tensors:
    """Return the update `θ_k − θ` in float64."""
    return dict(iter_change(before, after))


def iter_change(before: Tensors, after: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield `(name, θ_k − θ)` in float64, one tensor at a time, so that the update is never in memory as a whole."""
    for name, tensor in after.items():
        yield name, tensor.double() - before[name].double()


def uniform(generator: torch.Generator, bound: float, *shape: int) -> Tensor:
    """Draw a tensor of this shape from the uniform distribution over [-bound, bound)."""
    return (2 * torch.rand(*shape, generator=generator) - 1) * bound


def draw_linear(name: str, rows: int, columns: int, generator: torch.Generator) -> Tensors:
    """Draw a linear layer as PyTorch does, uniform in ±1/√columns.

    Returns:
        `name.weight`, shape (rows, columns), and `name.bias`, shape (rows,).
    """
    bound = 1 / math.sqrt(columns)
    return {
        f"{name}.weight": uniform(generator, bound, rows, columns),
        f"{name}.bias": uniform(generator, bound, rows),
    }
