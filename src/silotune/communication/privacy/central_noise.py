"""Clip changes at the coordinator, average them and add Gaussian noise (central differential privacy).

McMahan et al. 2018, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from silotune.aggregation.update import Update
from silotune.communication.privacy.mechanisms import Gaussian
from silotune.communication.privacy.noise_stream import noise_stream_for
from silotune.core.tensors import Tensors, change_of, clip_to_norm

COORDINATOR = ":coordinator"


@dataclass(frozen=True)
class CentralNoise:
    """The mean of clipped changes plus Gaussian noise of `multiplier·clip / silos` per number.

    The sum is divided by the number of silos of a round, not of updates: a missing or refused update counts as no
    change. Replacing one silo's rows then moves the mean by `2·clip / silos` at most.

    Args:
        multiplier: z, the noise in units of `clip`.
        clip: the L2 norm that a change is scaled down to.
        silos: the number of silos in a round.
        seed: the run's seed.
        secret: the coordinator's secret; see `noise_stream.py`.
    """

    multiplier: float
    clip: float
    silos: int
    seed: int
    secret: bytes | None = None

    def __call__(self, before: Tensors, updates: Iterable[Update], round_number: int) -> Tensors:
        """Return the shared parts after a round; `updates` are in silo-name order."""
        mean: Tensors = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in before.items()}
        for update in updates:
            for name, tensor in clip_to_norm(change_of(before, update.tensors), self.clip, "l2").items():
                mean[name] += tensor / self.silos
        noise = Gaussian(self.multiplier * self.clip / self.silos)
        noised = noise(mean, noise_stream_for(self.seed, self.secret, COORDINATOR, round_number, mean, repr(noise)))
        return {name: (tensor.double() + noised[name]).to(tensor.dtype) for name, tensor in before.items()}
