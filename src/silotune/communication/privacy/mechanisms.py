"""A silo clips its change and adds noise to it: the steps of an uplink that differential privacy consists of.

`Gaussian` is also the noise on the coordinator's mean. The coordinator clips updates itself: `aggregation.clip`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from silotune.communication.privacy.noise_stream import NoiseStream
from silotune.core.tensors import Norm, Tensors, clip_to_norm


@dataclass(frozen=True)
class Clip:
    """Scales a change whose norm exceeds `bound` down to it; any two are then at most `2·bound` apart."""

    bound: float
    norm: Norm

    def __repr__(self) -> str:
        """Return this step's text in the string that seeds the noise; changing it changes the noise of every run."""
        return f"Clip(bound={self.bound!r}, norm={self.norm!r})"

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """See `uplink.pipeline.UplinkStep`."""
        return clip_to_norm(change, self.bound, self.norm)


def laplace_scale(clip: float, epsilon: float) -> float:
    """Return `2C / ε`: replacing all rows of a silo moves a change clipped to L1 norm C by at most 2C."""
    return 2 * clip / epsilon


def laplace_tensor(uniform: Tensor, scale: float) -> Tensor:
    """Turn uniform numbers in (0, 1) into Laplace numbers, by the inverse of the distribution function."""
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
            name: tensor.double() + laplace_tensor(draws.uniform("laplace", name, tuple(tensor.shape)), self.scale)
            for name, tensor in change.items()
        }


def gaussian(uniform: Tensor, deviation: float) -> Tensor:
    """Turn uniform numbers in (0, 1) into Gaussian numbers, by the inverse of the distribution function."""
    normal: Tensor = torch.special.ndtri(uniform)
    return deviation * normal


@dataclass(frozen=True)
class Gaussian:
    """Adds an independent Gaussian number of this standard deviation to every coordinate."""

    deviation: float

    def __repr__(self) -> str:
        """Return this step's text in the string that seeds the noise; changing it changes the noise of every run."""
        return f"Gaussian(deviation={self.deviation!r})"

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """See `uplink.pipeline.UplinkStep`."""
        return {
            name: tensor.double() + gaussian(draws.uniform("gaussian", name, tuple(tensor.shape)), self.deviation)
            for name, tensor in change.items()
        }
