"""`Gaussian`: adds Gaussian noise to a silo's change (step of the uplink) or to the coordinator's mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from silotune.communication.privacy.noise_stream import NoiseStream
from silotune.core.tensors import Tensors

PURPOSE = "gaussian"


def gaussian(uniform: Tensor, deviation: float) -> Tensor:
    """Uniform numbers in (0, 1) → Gaussian numbers, by the inverse of the distribution function."""
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
            name: tensor.double() + gaussian(draws.uniform(PURPOSE, name, tuple(tensor.shape)), self.deviation)
            for name, tensor in change.items()
        }
