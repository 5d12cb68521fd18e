"""The step `laplace` of an uplink: noise that hides a clipped change up to ε."""

from __future__ import annotations

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
