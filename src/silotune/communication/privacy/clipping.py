"""Clipping of what a silo sends: the bound that makes its noise mean something."""

from __future__ import annotations

from dataclasses import dataclass

from silotune.communication.privacy.noise_stream import NoiseStream
from silotune.core.norms import Norm, clip_to_norm
from silotune.core.tensors import Tensors


@dataclass(frozen=True)
class Clip:
    """Scales the change down to a norm of `bound`; two changes are then at most `2·bound` apart."""

    bound: float
    norm: Norm

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """See `uplink.base.Step`."""
        return clip_to_norm(change, self.bound, self.norm)
