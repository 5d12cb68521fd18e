"""Changes of a linear layer's output by a mix of low-rank updates `factor·B·A·x`, in two products for all parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from silotune.errors import InputError
from silotune.models.backbone.forward_plan import OutputChange
from silotune.models.backbone.segments import Segments
from silotune.models.tuners.base import WeightedTensors, per_row, scalar_weights


def add_update(mix: Sequence[WeightedTensors], module: str, factor: float, dropout: float) -> OutputChange:
    """Compute the mix in two products, with A of all parts stacked and B of all parts side by side.

    With dropout there is one product with A per part, since each part drops other inputs.
    """
    down = [part.tensors[f"{module}.lora_A.weight"] for part in mix]
    up = [part.tensors[f"{module}.lora_B.weight"] for part in mix]
    numbers = scalar_weights(mix)
    if numbers is not None and not dropout and not torch.is_grad_enabled():
        return _add_constant_update(concatenate(down, 0), _weighted(up, numbers, factor))

    def change(x: Tensor, y: Tensor) -> Tensor:
        if dropout:
            low = torch.cat([nn.functional.linear(nn.functional.dropout(x, dropout), a.to(x.dtype)) for a in down], -1)
        else:
            low = nn.functional.linear(x, concatenate(down, 0).to(x.dtype))
        if numbers is None:
            at_tokens = [
                part if part.tokens is None else replace(part, weight=part.tokens.at(module, x)) for part in mix
            ]
            low = scale_columns(low, at_tokens, down[0].shape[0], factor)
            wide = concatenate(up, 1)
        else:
            wide = _weighted(up, numbers, factor)
        return add_product(y, low, wide)

    return change


def add_to_experts(
    weight: Tensor, mix: Sequence[WeightedTensors], module: str, factor: float, transposed: bool
) -> Tensor:
    """Return the weights of all experts with the mix added, in one batched product.

    Args:
        weight: shape (experts, out, in).
        mix: A of shape (experts, r, in), B of shape (experts, out, r).
        module: the tensor's name.
        factor: the scale of B·A.
        transposed: whether the weight's shape is (experts, in, out).
    """
    for part in mix:
        if part.tokens is not None or (isinstance(part.weight, Tensor) and part.weight.dim()):
            raise InputError("tuner.sites: experts' adapters cannot be weighed by row or token; leave experts out")
    down = concatenate([part.tensors[f"{module}.lora_A.weight"] for part in mix], 1).to(weight.dtype)
    wide = concatenate([part.tensors[f"{module}.lora_B.weight"] * part.weight for part in mix], 2).to(weight.dtype)
    left, right = (down.mT, wide.mT) if transposed else (wide, down)
    return torch.baddbmm(weight, left, right, alpha=factor)


def _add_constant_update(down: Tensor, wide: Tensor) -> OutputChange:
    """Do `add_update` without gradient; its tensors are cast once for the many forward passes of generation."""
    cast_to: dict[tuple[torch.dtype, torch.dtype], tuple[Tensor, Tensor]] = {}

    def change(x: Tensor, y: Tensor) -> Tensor:
        product = y.dtype if torch.is_autocast_enabled(x.device.type) else x.dtype
        if (product, y.dtype) not in cast_to:
            cast_to[product, y.dtype] = down.to(product), wide.to(y.dtype)
        a, b = cast_to[product, y.dtype]
        return add_product(y, nn.functional.linear(x, a), b)

    return change


def _weighted(up: Sequence[Tensor], numbers: Sequence[float], factor: float) -> Tensor:
    """B of all parts side by side, each times its weight and scale."""
    return concatenate([times(b, number * factor) for b, number in zip(up, numbers, strict=True)], 1)


def add_update_to_segments(
    mix: Sequence[WeightedTensors], module: str, factor: float, segments: Segments
) -> OutputChange:
    """Do `add_update` for tensors of shape (segments, …), with two batched products for all segments."""
    numbers = scalar_weights(mix)
    assert numbers is not None, "segments have numbers for weights"

    def change(x: Tensor, y: Tensor) -> Tensor:
        down = concatenate([part.tensors[f"{module}.lora_A.weight"] for part in mix], 1).to(x.dtype)
        up = [part.tensors[f"{module}.lora_B.weight"] for part in mix]
        wide = concatenate([times(b, number * factor) for b, number in zip(up, numbers, strict=True)], 2).to(y.dtype)
        low = torch.bmm(segments.group(x), down.mT)
        return segments.add_product(y, low.to(y.dtype), wide)

    return change


def add_product(y: Tensor, low: Tensor, wide: Tensor) -> Tensor:
    """Compute `y + low·wideᵀ` in one pass over y. Shapes: y (…, out), low (…, r), wide (out, r)."""
    flat = torch.addmm(y.reshape(-1, y.shape[-1]), low.reshape(-1, low.shape[-1]).to(y.dtype), wide.to(y.dtype).t())
    return flat.view(y.shape)


def scale_columns(low: Tensor, mix: Sequence[WeightedTensors], width: int, factor: float = 1.0) -> Tensor:
    """Multiply each part's `width` columns of `low` (rows, tokens, parts·width) by the part's weight and `factor`."""
    scaled = []
    for part, columns in zip(mix, torch.split(low, width, -1), strict=True):
        weight = part.weight
        scaled.append(columns * (per_row(weight, columns) * factor if isinstance(weight, Tensor) else weight * factor))
    return torch.cat(scaled, -1)


def times(tensor: Tensor, number: float) -> Tensor:
    """Compute `number · tensor`, without a copy for 1."""
    return tensor if number == 1 else tensor * number


def concatenate(tensors: list[Tensor], dimension: int) -> Tensor:
    """Concatenate without a copy of a single tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dimension)


def trains(mix: Sequence[WeightedTensors]) -> bool:
    """Whether a part of the mix is trained."""
    return any(tensor.requires_grad for part in mix for tensor in part.tensors.values())
