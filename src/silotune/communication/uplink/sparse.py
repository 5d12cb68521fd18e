"""Codecs that write some numbers of each tensor: the largest, or random ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from typing_extensions import override

from silotune.communication.privacy.noise import NoiseStream
from silotune.communication.uplink.codecs import VALUES, Codec, Float16, Layout, Shape, UniformQuantizer
from silotune.core.numeric import ceil_fraction

POSITIONS = ":positions"

_INNER: dict[str, Codec] = {"fp16": Float16(), "int8": UniformQuantizer(127), "int4": UniformQuantizer(7)}


class TopKOptions(BaseModel):
    """The options of `topk`."""

    model_config = ConfigDict(frozen=True)

    fraction: float = Field(
        default=0.01, gt=0, le=1, description="the share of a tensor's numbers that topk and randomk send, rounded up."
    )
    values: Literal["float32", "fp16", "int8", "int4"] = Field(
        default="float32", description="how topk and randomk write these numbers."
    )


class RandomKOptions(TopKOptions):
    """The options of `randomk`."""

    unbiased: bool = Field(
        default=False,
        description="divide what randomk sends by its share, so that it is unbiased; then no error is kept.",
    )


class _Sparse(ABC):
    """`⌈fraction·n⌉` numbers of a tensor, at positions that a subclass chooses; the others are 0."""

    draws = False

    def __init__(self, options: TopKOptions) -> None:
        self._fraction, self._inner = options.fraction, _INNER.get(options.values)

    @abstractmethod
    def layout(self, shape: Shape) -> Layout:
        """See `Codec.layout`."""

    def _count(self, shape: Shape) -> int:
        return ceil_fraction(self._fraction, prod(shape))

    def _values_layout(self, shape: Shape) -> Layout:
        count = (self._count(shape),)
        return {VALUES: (count, torch.float32)} if self._inner is None else self._inner.layout(count)

    def _write(self, entries: Tensor) -> dict[str, Tensor]:
        return {VALUES: entries.float()} if self._inner is None else self._inner.encode(entries)

    def _read(self, written: Mapping[str, Tensor], positions: Tensor, shape: Shape) -> Tensor:
        values = written[VALUES] if self._inner is None else self._inner.decode(written, tuple(positions.shape))
        return torch.zeros(prod(shape)).index_copy(0, positions, values.float()).reshape(shape)


class TopK(_Sparse):
    """The `⌈fraction·n⌉` numbers of largest magnitude, and their positions in the flattened tensor (int32, ascending).

    Sparsification of Aji and Heafield 2017; what is left out stays in the silo's memory with `uplink.feedback` (Stich,
    Cordonnier and Jaggi 2018, Algorithm 1). Of equal magnitudes the first ones are sent.
    """

    Options = TopKOptions

    def __init__(self, options: TopKOptions | None = None) -> None:
        super().__init__(options or TopKOptions())

    @override
    def layout(self, shape: Shape) -> Layout:
        return {**self._values_layout(shape), POSITIONS: ((self._count(shape),), torch.int32)}

    def encode(self, tensor: Tensor, uniform: Tensor | None = None) -> dict[str, Tensor]:
        """Keep the entries of largest magnitude with their positions."""
        flat = tensor.double().reshape(-1)
        order = flat.abs().argsort(descending=True, stable=True)  # NaN comes first
        positions = order[: self._count(tuple(tensor.shape))].sort().values
        return {**self._write(flat[positions]), POSITIONS: positions.to(torch.int32)}

    def decode(self, written: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """Put the kept entries back at their positions; the others are zero."""
        positions = written[POSITIONS].long()
        size = prod(shape)
        bounded = bool((positions >= 0).all() and (positions < size).all())
        if not bounded or not bool((positions.diff() > 0).all()):
            raise ValueError(f"holds positions that do not ascend within its {size} numbers")
        return self._read(written, positions, shape)


class RandomK(_Sparse):
    """Sends `⌈fraction·n⌉` of a tensor's n numbers, at random positions (Konečný et al. 2016).

    The positions are drawn anew for each tensor, silo and round. They are not sent: both sides draw them from the run's
    seed, independently of the numbers. With `uplink.feedback` the silo keeps what it left out and adds it to its next
    change. With `unbiased` it keeps nothing, and the received numbers are multiplied by n / ⌈fraction·n⌉ instead.
    """

    Options = RandomKOptions

    def __init__(self, options: RandomKOptions | None = None, key: bytes = b"") -> None:
        self._options = options or RandomKOptions()
        super().__init__(self._options)
        self._stream = NoiseStream(key)

    def seeded(self, key: bytes) -> RandomK:
        """Return the codec with the key from which a message's positions are drawn."""
        return RandomK(self._options, key)

    @override
    def layout(self, shape: Shape) -> Layout:
        return self._values_layout(shape)

    def encode(self, tensor: Tensor, uniform: Tensor | None = None) -> dict[str, Tensor]:
        """Keep entries at drawn positions."""
        flat = tensor.double().reshape(-1)
        entries = flat[self._positions(tuple(tensor.shape))]
        diverged = not bool(torch.isfinite(flat).all())  # also where no chosen number says so
        return self._write(torch.full_like(entries, torch.nan) if diverged else entries)

    def decode(self, written: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """Put the kept entries back at the drawn positions, scaled up if `unbiased`."""
        tensor = self._read(written, self._positions(shape), shape)
        return tensor * (prod(shape) / max(self._count(shape), 1)) if self._options.unbiased else tensor

    def _positions(self, shape: Shape) -> Tensor:
        """Draw positions in the flattened tensor, ascending: those of the smallest of its uniform numbers."""
        order = self._stream.uniform("positions", "", (prod(shape),)).argsort(stable=True)
        return order[: self._count(shape)].sort().values
