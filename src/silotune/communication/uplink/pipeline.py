"""The uplink: what the change of the shared parts passes between a silo's training and its message.

A chain is ordered: clip, then noise, then one codec. With an empty chain there is none of this: messages hold the
shared parts themselves. Otherwise they hold the change against what the silo received, and the coordinator adds it to
what it had broadcast. Everything happens in the silo, before serialization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from silotune.communication.messages import Expected, MessageRefused
from silotune.communication.privacy.noise_stream import NoiseStream, draws
from silotune.communication.uplink.codecs import Codec
from silotune.core.tensors import Tensors

_MEMORY = "uplink/"


class UplinkStep(Protocol):
    """A step that changes the numbers, not how they are written."""

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """The change after this step, float64."""


@dataclass(frozen=True)
class UplinkPipeline:
    """An uplink.

    Args:
        names: the steps' names, in order.
        steps: clip and noise, where they are wanted.
        codec: how numbers are written; None: float32.
        feedback: whether a silo keeps what the codec took away and adds it to its next change (error feedback, Seide
            et al. 2014; Karimireddy et al. 2019, Algorithm 1). It is a function of what was noised already, so it
            reveals nothing more.
        seed: of the run.
        secret: of the silo; see `uplink/draws.py`.
    """

    names: tuple[str, ...]
    steps: tuple[UplinkStep, ...] = ()
    codec: Codec | None = None
    feedback: bool = True
    seed: int = 0
    secret: bytes | None = None

    @property
    def label(self) -> str:
        """As it is written in a message, so that a change is never taken for a part."""
        return ",".join(self.names)

    def send(self, change: Tensors, memory: Tensors, silo: str, number: int) -> tuple[Tensors, Tensors]:
        """What a silo's message holds of its change, and what the silo keeps.

        Args:
            change: trained minus received, by "part/tensor" name.
            memory: the silo's, as of its last participation.
            silo: its name.
            number: the round.
        """
        change = {name: tensor.double() for name, tensor in sorted(change.items())}
        drawn = draws(self.seed, self.secret, silo, number, change, repr((self.steps, self.codec)))
        for step in self.steps:
            change = step(change, drawn)
        if self.codec is None:
            return {name: tensor.float() for name, tensor in change.items()}, {}
        written: Tensors = {}
        kept: Tensors = {}
        for name, tensor in change.items():
            before = memory.get(_MEMORY + name) if self.feedback else None
            wanted = tensor if before is None else tensor + before.double()
            shape = tuple(tensor.shape)
            chance = drawn.uniform("rounding", name, shape) if self.codec.draws else None
            entry = self.codec.encode(wanted, chance)
            written |= {name + suffix: value for suffix, value in entry.items()}
            if self.feedback:
                left = (wanted - self.codec.decode(entry, shape).double()).float()
                usable = bool(torch.isfinite(left).all())  # a change that diverged is refused on arrival and forgotten
                kept[_MEMORY + name] = left if usable else torch.zeros(shape)
        return written, kept

    def expected(self, shared: Expected) -> Expected:
        """What an update holds, where broadcasts hold `shared`."""
        if self.codec is None:
            return shared
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name, shape in shared.shapes.items():
            for suffix, (written, dtype) in self.codec.layout(shape).items():
                shapes[name + suffix], dtypes[name + suffix] = written, dtype
        return Expected(shapes, dtypes)

    def read(self, written: Mapping[str, Tensor], before: Tensors) -> Tensors:
        """The silo's shared parts: what was broadcast plus the change in its message.

        Raises:
            MessageRefused: for codes or scales that no silo writes, or numbers too large to be added.
        """
        found: Tensors = {}
        for name, tensor in before.items():
            shape = tuple(tensor.shape)
            if self.codec is None:
                change = written[name]
            else:
                entry = {suffix: written[name + suffix] for suffix in self.codec.layout(shape)}
                try:
                    change = self.codec.decode(entry, shape)
                except ValueError as error:
                    raise MessageRefused(f"tensor {name!r} {error}") from error
            found[name] = (tensor.double() + change.double()).to(tensor.dtype)
            if not bool(torch.isfinite(found[name]).all()):
                raise MessageRefused(f"tensor {name!r} becomes NaN or infinity")
        return found


NO_UPLINK = UplinkPipeline(())
"""Messages hold the shared parts themselves."""
