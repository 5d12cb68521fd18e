"""Pass a silo's change through clipping, noise and codec, and decode it at the coordinator.

The steps are ordered: clip, then noise, then one codec. Without steps, messages hold the shared parts themselves.
Otherwise they hold the change relative to the received parts, and the coordinator adds it to the parts it broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from silotune.communication.messages import Expected, MessageRefused
from silotune.communication.privacy.noise import NoiseStream, noise_stream_for
from silotune.communication.uplink.codecs import Codec, SeededCodec
from silotune.core.randomness import derive
from silotune.core.tensors import Tensors
from silotune.errors import InputError

_MEMORY = "uplink/"


class UplinkStep(Protocol):
    """A step that changes numbers: clipping or noise."""

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """Return the change after this step, float64."""


@dataclass(frozen=True)
class UplinkPipeline:
    """The configured steps in order.

    Args:
        codec: the representation of numbers; float32 without a codec.
        feedback: whether a silo keeps the codec's error and adds it to its next change (error feedback, Seide et al.
            2014; Karimireddy et al. 2019, Algorithm 1). The error depends on the noised change alone and so reveals
            nothing more.
        secret: the silo's secret; see `privacy/noise.py`.
        codec_key: replaces the codec in the key of noise, for a codec without a stable `repr`.
        run: a digest of the configuration, on which noise by a secret depends.
    """

    names: tuple[str, ...]
    steps: tuple[UplinkStep, ...] = ()
    codec: Codec | None = None
    feedback: bool = True
    seed: int = 0
    secret: bytes | None = None
    codec_key: str | None = None
    run: str = ""

    @property
    def noise_key(self) -> str:
        """The steps with their numbers; with a secret, noise is derived from them.

        The string is a format: another one gives other noise for the same secret and change.
        """
        return repr((self.steps, self.codec if self.codec_key is None else self.codec_key))

    @property
    def label(self) -> str:
        """Return the steps' names, a field of messages that keeps a change from being read as a part."""
        return ",".join(self.names)

    def send(
        self, change: Tensors, memory: Tensors, silo: str, round_number: int, question: str = ""
    ) -> tuple[Tensors, Tensors]:
        """Apply the steps to a silo's change, trained minus received; `question` as of `noise_stream_for`.

        Returns the tensors of the message, and the codec's error for the silo's memory.
        """
        change = {name: tensor.double() for name, tensor in sorted(change.items())}
        stream = noise_stream_for(self.seed, self.secret, silo, round_number, change, self.noise_key, question)
        for step in self.steps:
            change = step(change, stream)
        if self.codec is None:
            return {name: tensor.float() for name, tensor in change.items()}, {}
        written: Tensors = {}
        errors: Tensors = {}
        for name, tensor in change.items():
            before = memory.get(_MEMORY + name) if self.feedback else None
            corrected = tensor if before is None else tensor + before.double()
            shape = tuple(tensor.shape)
            codec = self._codec_of(self.codec, name, silo, round_number)
            chance = stream.uniform("rounding", name, shape) if codec.draws else None
            entry = codec.encode(corrected, chance)
            forms = {suffix: (tuple(value.shape), value.dtype) for suffix, value in entry.items()}
            if forms != (layout := dict(codec.layout(shape))):  # the coordinator would refuse every round
                raise InputError(f"codec {type(codec).__name__}: encodes {name!r} as {forms}; its layout is {layout}")
            written |= {name + suffix: value for suffix, value in entry.items()}
            if self.feedback:
                error = (corrected - codec.decode(entry, shape).double()).float()
                usable = bool(torch.isfinite(error).all())  # a change that diverged is refused on arrival and forgotten
                errors[_MEMORY + name] = error if usable else torch.zeros(shape)
        return written, errors

    def _codec_of(self, codec: Codec, name: str, silo: str, round_number: int) -> Codec:
        """Return the codec of one tensor of a message; its draws follow from the run's seed, never from a secret."""
        if not isinstance(codec, SeededCodec):
            return codec
        return codec.seeded(derive(self.seed, "uplink codec", silo, round_number, name).to_bytes(8, "big"))

    def expected(self, shared: Expected) -> Expected:
        """Return the tensors that an update must hold if a broadcast holds `shared`."""
        if self.codec is None:
            return shared
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name, shape in shared.shapes.items():
            for suffix, (written, dtype) in self.codec.layout(shape).items():
                shapes[name + suffix], dtypes[name + suffix] = written, dtype
        return Expected(shapes, dtypes)

    def read(self, written: Mapping[str, Tensor], before: Tensors, silo: str, round_number: int) -> Tensors:
        """Return the silo's shared parts: the broadcast tensors `before` plus the change in its message."""
        tensors: Tensors = {}
        for name, change in self.changes(written, before, silo, round_number):
            tensor = before[name]
            tensors[name] = (tensor.double() + change.double()).to(tensor.dtype)
            if not bool(torch.isfinite(tensors[name]).all()):
                raise MessageRefused(f"tensor {name!r} becomes NaN or infinity")
        return tensors

    def changes(
        self, written: Mapping[str, Tensor], before: Tensors, silo: str, round_number: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the change of each tensor of `before`, as a message has it; arguments as `read`."""
        for name, tensor in before.items():
            if self.codec is None:
                yield name, written[name]
                continue
            shape = tuple(tensor.shape)
            entry = {suffix: written[name + suffix] for suffix in self.codec.layout(shape)}
            try:
                yield name, self._codec_of(self.codec, name, silo, round_number).decode(entry, shape)
            except ValueError as error:
                raise MessageRefused(f"tensor {name!r} {error}") from error


NO_UPLINK = UplinkPipeline(())
"""Messages hold the shared parts themselves."""
