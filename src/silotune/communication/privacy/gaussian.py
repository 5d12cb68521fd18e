"""Gaussian noise, on what a silo sends or on the coordinator's mean. How much: `privacy/accounting.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from silotune.communication.privacy.noise_stream import NoiseStream
from silotune.core.tensors import Tensors

PURPOSE = "gaussian"


def gaussian(uniform: Tensor, deviation: float) -> Tensor:
    """Uniform numbers in (0, 1) → Gaussian numbers, by the inverse of the distribution function."""
    found: Tensor = torch.special.ndtri(uniform)
    return deviation * found


@dataclass(frozen=True)
class Gaussian:
    """Adds an independent Gaussian number of this standard deviation to every coordinate."""

    deviation: float

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """See `uplink.base.Step`."""
        return {
            name: tensor.double() + gaussian(draws.uniform(PURPOSE, name, tuple(tensor.shape)), self.deviation)
            for name, tensor in change.items()
        }
