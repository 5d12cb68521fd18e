"""`Laplace`, a step of the uplink, adds noise of `laplace_scale`; `laplace_number` is the noise on one score."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from silotune.communication.privacy.noise_stream import NoiseStream
from silotune.core.tensors import Tensors

PURPOSE = "laplace"


def laplace_scale(clip: float, epsilon: float) -> float:
    """`2C / ε`: replacing all of a silo's rows moves a change of L1 norm C or less by 2C at most, in L1."""
    return 2 * clip / epsilon


def laplace_tensor(uniform: Tensor, scale: float) -> Tensor:
    """Uniform numbers in (0, 1) → Laplace numbers, by the inverse of the distribution function."""
    centered = uniform - 0.5
    return -scale * centered.sign() * torch.log1p(-2 * centered.abs())


def laplace_number(uniform: float) -> float:
    """One uniform number in [0, 1) → a Laplace number of scale 1, in Python's floats; 0 → 0."""
    centered = uniform - 0.5
    return -math.copysign(math.log1p(-2 * abs(centered)), centered) if abs(centered) < 0.5 else 0.0


@dataclass(frozen=True)
class Laplace:
    """Adds an independent Laplace number of this scale to every coordinate."""

    scale: float

    def __repr__(self) -> str:
        """Return this step's text in the string that seeds the noise; changing it changes the noise of every run."""
        return f"Laplace(scale={self.scale!r})"

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """See `uplink.pipeline.UplinkStep`."""
        return {
            name: tensor.double() + laplace_tensor(draws.uniform(PURPOSE, name, tuple(tensor.shape)), self.scale)
            for name, tensor in change.items()
        }
