"""`TopK`: a codec that writes the largest numbers of each tensor with their positions, as float32 or shorter."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from silotune.communication.uplink.codecs import VALUES, Codec, Float16, Layout, Shape, UniformQuantizer
from silotune.core.numeric import ceil_fraction

POSITIONS = ":positions"

_INNER: dict[str, Codec] = {"fp16": Float16(), "int8": UniformQuantizer(127), "int4": UniformQuantizer(7)}


class TopKOptions(BaseModel):
    """`fraction`: the share of a tensor's numbers that is sent, rounded up. `values`: how they are written."""

    model_config = ConfigDict(frozen=True)

    fraction: float = Field(0.01, gt=0, le=1)
    values: Literal["float32", "fp16", "int8", "int4"] = "float32"


class TopK:
    """The `⌈fraction·n⌉` numbers of largest magnitude, and their positions in the flattened tensor (int32, ascending).

    Sparsification of Aji and Heafield 2017; what is left out stays in the silo's memory with `uplink.feedback` (Stich,
    Cordonnier and Jaggi 2018, Algorithm 1). Of equal magnitudes the first ones are sent.
    """

    Options = TopKOptions
    draws = False

    def __init__(self, options: TopKOptions | None = None) -> None:
        self.options = options or TopKOptions()
        self._inner = _INNER.get(self.options.values)

    def layout(self, shape: Shape) -> Layout:
        """See `Codec.layout`."""
        count = (self._count(shape),)
        values = {VALUES: (count, torch.float32)} if self._inner is None else self._inner.layout(count)
        return {**values, POSITIONS: (count, torch.int32)}

    def encode(self, tensor: Tensor, uniform: Tensor | None = None) -> dict[str, Tensor]:
        """See `Codec.encode`."""
        flat = tensor.double().reshape(-1)
        order = flat.abs().argsort(descending=True, stable=True)  # NaN comes first
        positions = order[: self._count(tuple(tensor.shape))].sort().values
        chosen = flat[positions]
        values = {VALUES: chosen.float()} if self._inner is None else self._inner.encode(chosen)
        return {**values, POSITIONS: positions.to(torch.int32)}

    def decode(self, written: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """See `Codec.decode`."""
        positions = written[POSITIONS].long()
        size = prod(shape)
        bounded = bool((positions >= 0).all() and (positions < size).all())
        if not bounded or not bool((positions.diff() > 0).all()):
            raise ValueError(f"holds positions that do not ascend within its {size} numbers")
        values = written[VALUES] if self._inner is None else self._inner.decode(written, tuple(positions.shape))
        return torch.zeros(size).index_copy(0, positions, values.float()).reshape(shape)

    def _count(self, shape: Shape) -> int:
        return ceil_fraction(self.options.fraction, prod(shape))
