"""Codecs that write a change in fewer bits: 16, or 8 or 4 with a scale for each channel.

A channel is a slice along the shorter of a tensor's first and last axis (a rank of a LoRA, a unit of a bottleneck, a
token of a prompt): few scales, each over many numbers. Tensors of one axis or none have one scale. A channel's largest
number is in range, zero stays zero, and rounding to the nearest code moves no number by more than half a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Shape = tuple[int, ...]

Layout = dict[str, tuple[Shape, torch.dtype]]
"""The tensors that represent one tensor in a message: suffix of its name → shape and dtype."""


VALUES = ""

SCALE = ":scale"

_FP16_MOST = 65504.0


class Codec(Protocol):
    """A shorter representation of a change, tensor by tensor.

    The silo may keep the error and add it to its next change (`uplink.feedback`).

    A codec is a class. It is called without arguments or, if it has a pydantic model `Options`, with an instance of it
    that holds the keys of the section `uplink` (`uplink.fraction=0.1`). Where an option `unbiased` is true, no error is
    kept. It keeps no state between calls, so that silo
    and coordinator need nothing but the options to agree.

    Example, one half of float16's bytes:

        class Signs:
            draws = False

            def layout(self, shape):
                return {"": (shape, torch.int8), ":scale": ((), torch.float32)}

            def encode(self, tensor, uniform=None):
                scale = tensor.abs().mean() if tensor.numel() else torch.zeros(())
                return {"": tensor.sign().to(torch.int8), ":scale": scale.float()}

            def decode(self, written, shape):
                return written[""] * written[":scale"]
    """

    @property
    def draws(self) -> bool:
        """Whether `encode` needs uniform numbers, such as for stochastic rounding; positions are a `SeededCodec`'s."""

    def layout(self, shape: Shape) -> Layout:
        """Return the tensors that `encode` writes for a tensor of this shape; the values cannot change them.

        The keys are appended to the tensor's name in a message: "" for the tensor that stands for its
        numbers, and suffixes like ":scale" for the others.
        """

    def encode(self, tensor: Tensor, uniform: Tensor | None = None) -> dict[str, Tensor]:
        """Return a tensor's representation, with the names, shapes and dtypes of `layout`.

        NaN must come out as NaN or infinity in a float tensor, so that the coordinator refuses a change that diverged.
        A number out of the format's range may become its largest number.

        Args:
            tensor: the change after clipping and noise, plus the error kept from earlier rounds; float64.
            uniform: numbers in (0, 1), float64, of the tensor's shape, for stochastic rounding; None unless `draws`.
                They are derived from the run's seed or the silo's secret; the same round draws the same numbers.
        """

    def decode(self, written: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """Return the tensor, float32.

        The coordinator calls this after it has checked that names, shapes and dtypes are those of `layout` and that
        all floats are finite. Codes and positions out of range are left for this function to refuse.

        Raises:
            ValueError: `encode` cannot have written this. The text completes the line "tensor 'x' …", for example
                "has a negative scale".
        """


@runtime_checkable
class SeededCodec(Codec, Protocol):
    """A codec that draws numbers which both sides need, such as positions; they are not sent."""

    def seeded(self, key: bytes) -> Codec:
        """Return the codec of one tensor of one message; silo and coordinator call it with the same key.

        The key follows from the run's seed, the silo, the round and the tensor's name. It is no secret.
        """


@dataclass(frozen=True)
class Float16:
    """IEEE half precision; numbers beyond its range become its largest number."""

    draws: bool = False

    def __repr__(self) -> str:
        """Return the codec's part of the key of noise; it is a format (`UplinkPipeline.noise_key`)."""
        return f"Half(draws={self.draws!r})"

    def layout(self, shape: Shape) -> Layout:
        """See `Codec.layout`."""
        return {VALUES: (shape, torch.float16)}

    def encode(self, tensor: Tensor, uniform: Tensor | None = None) -> dict[str, Tensor]:
        """See `Codec.encode`."""
        return {VALUES: tensor.clamp(-_FP16_MOST, _FP16_MOST).to(torch.float16)}

    def decode(self, written: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """See `Codec.decode`."""
        return written[VALUES].float()


@dataclass(frozen=True)
class UniformQuantizer:
    """Codes from −most to most: 127 for int8, 7 for int4, of which two share a byte (the first in its low half)."""

    most: int
    stochastic: bool = False

    def __repr__(self) -> str:
        """Return the codec's part of the key of noise; it is a format (`UplinkPipeline.noise_key`)."""
        return f"Integers(most={self.most!r}, stochastic={self.stochastic!r})"

    @property
    def draws(self) -> bool:
        """See `Codec.draws`."""
        return self.stochastic

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.most < 8

    def layout(self, shape: Shape) -> Layout:
        """See `Codec.layout`."""
        scales = (channels(shape),)
        if self.packed:
            return {VALUES: ((-(-prod(shape) // 2),), torch.uint8), SCALE: (scales, torch.float32)}
        return {VALUES: (shape, torch.int8), SCALE: (scales, torch.float32)}

    def encode(self, tensor: Tensor, uniform: Tensor | None = None) -> dict[str, Tensor]:
        """See `Codec.encode`."""
        shape = tuple(tensor.shape)
        rows = _by_channel(tensor.double(), shape)
        scale = self._scales(rows)
        steps = rows / scale.double().unsqueeze(1)
        steps = steps.round() if uniform is None else (steps + _by_channel(uniform, shape)).floor()
        codes = steps.nan_to_num(0.0, 0.0, 0.0).clamp(-self.most, self.most)  # a channel of zeros, or a scale of NaN
        values = _from_channels(codes.to(torch.int8), shape)
        return {VALUES: pack4(values) if self.packed else values, SCALE: scale}

    def _scales(self, rows: Tensor) -> Tensor:
        """Return a scale per channel, float32, rounded up if rounding down put its largest number out of range."""
        largest = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
        scale = (largest / self.most).float()
        return torch.where(scale.double() * self.most < largest, scale.nextafter(torch.tensor(torch.inf)), scale)

    def decode(self, written: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """See `Codec.decode`."""
        scale = written[SCALE]
        if bool((scale < 0).any()):
            raise ValueError("has a negative scale")
        codes = unpack4(written[VALUES], prod(shape)).reshape(shape) if self.packed else written[VALUES]
        if bool((codes < -self.most).any()):
            raise ValueError(f"holds a code below {-self.most}")
        values = _by_channel(codes, shape).float() * scale.unsqueeze(1)
        return _from_channels(values, shape)


def channels(shape: Shape) -> int:
    """Return the number of scales of a tensor."""
    return min(shape[0], shape[-1]) if len(shape) > 1 else 1


def _by_channel(tensor: Tensor, shape: Shape) -> Tensor:
    """Reshape to (channels, numbers per channel)."""
    if len(shape) > 1 and shape[-1] < shape[0]:
        tensor = tensor.movedim(-1, 0)
    return tensor.reshape(channels(shape), prod(shape) // max(channels(shape), 1))


def _from_channels(rows: Tensor, shape: Shape) -> Tensor:
    """Undo `_by_channel`."""
    if len(shape) > 1 and shape[-1] < shape[0]:
        return rows.reshape(shape[-1], *shape[:-1]).movedim(0, -1).contiguous()
    return rows.reshape(shape)


def pack4(codes: Tensor) -> Tensor:
    """Pack codes from −7 to 7, each plus 8, two to a byte; the last of an odd number shares its byte with a zero."""
    halves = (codes.reshape(-1).to(torch.int16) + 8).to(torch.uint8)
    if len(halves) % 2:
        halves = torch.cat([halves, torch.full((1,), 8, dtype=torch.uint8)])
    return halves[0::2] | (halves[1::2] << 4)


def unpack4(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` codes of packed bytes, int8."""
    halves = torch.stack([packed & 15, packed >> 4], dim=1).reshape(-1).to(torch.int8) - 8
    if bool((halves[count:] != 0).any()):
        raise ValueError("has a nonzero padding code in its last byte")
    return halves[:count]
