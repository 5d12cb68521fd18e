"""Clipping of what a silo sends: the bound that makes its noise mean something."""

from __future__ import annotations

from dataclasses import dataclass

from silotune.communication.privacy.noise_stream import Draws
from silotune.core.norms import Norm, scaled_down
from silotune.core.tensors import Tensors


@dataclass(frozen=True)
class Clip:
    """Scales the change down to a norm of `bound`; two changes are then at most `2·bound` apart."""

    bound: float
    norm: Norm

    def __call__(self, change: Tensors, draws: Draws) -> Tensors:
        """See `uplink.base.Step`."""
        return scaled_down(change, self.bound, self.norm)
