"""Clips a silo's change to a norm, which bounds its sensitivity for the noise after it."""

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

    def __repr__(self) -> str:
        """Return the step's part of the key of noise; it is a format (`UplinkPipeline.noise_key`)."""
        return f"Clip(bound={self.bound!r}, norm={self.norm!r})"

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """See `uplink.pipeline.UplinkStep`."""
        return clip_to_norm(change, self.bound, self.norm)
