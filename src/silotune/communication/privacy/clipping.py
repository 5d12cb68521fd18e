"""`Clip`, a step of the uplink: a silo clips its own change, to bound what noise must hide.

The coordinator clips updates itself: `aggregation.clip` by `clipped` in `aggregation/update.py`, and
`central_noise.py`. The factor is `clipping_factor` of `core/norms.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from silotune.communication.privacy.noise_stream import NoiseStream
from silotune.core.norms import Norm, clip_to_norm
from silotune.core.tensors import Tensors


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
