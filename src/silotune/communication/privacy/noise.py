"""Clipping and noise: of a silo on its change, and of the coordinator on the mean of changes.

The numbers of noise and rounding are drawn from the run's seed, or from the secret file `privacy.secret`.

Noise derived from the seed is reproducible, but anyone who knows the seed can subtract it. A silo that needs protection
therefore has a secret. Its noise is then derived from the secret, the change and the steps: sending the same change
twice gives the same message. Two different changes (a repeated round with other parts), or one change under two
strengths of noise (another run with another ε), must never get the same noise: their difference would be revealed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from silotune.aggregation.update import Update
from silotune.core.tensors import Norm, Tensors, change_of, clip_to_norm, digest
from silotune.errors import InputError, file_errors

_LEAST = 16

_PIECE = 2.0**-52


class NoiseStream:
    """Uniform numbers for one silo and round, by purpose."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @property
    def word(self) -> str:
        """A word derived from the stream's key, with which to seed generators of PyTorch."""
        return hashlib.sha256(b"word\x1f" + self._key).hexdigest()

    def uniform(self, purpose: str, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return float64 numbers in (0, 1), ends excluded: the middles of 2⁵² equal pieces, exact in float64."""
        stream = hashlib.shake_256(f"{purpose}\x1f{name}\x1f".encode() + self._key).digest(8 * prod(shape))
        pieces = np.frombuffer(stream, dtype="<u8") >> np.uint64(12)
        return torch.from_numpy((pieces.astype(np.float64) + 0.5) * _PIECE).reshape(shape)


def noise_stream_for(
    seed: int, secret: bytes | None, silo: str, round_number: int, change: Tensors, how: str
) -> NoiseStream:
    """Return the stream of a silo in a round; with a secret, its key has the change, and `how` it is noised."""
    purpose = f"uplink\x1f{silo}\x1f{round_number}"
    if secret is None:
        return NoiseStream(hashlib.sha256(f"{purpose}\x1f{seed}".encode()).digest())
    return NoiseStream(hmac.digest(secret, f"{purpose}\x1f{how}\x1f{digest(change)}".encode(), "sha256"))


def secret_seed(seed: int, secret: bytes) -> int:
    """Return a secret seed for sampling silos, which the accountant of sampled central noise relies on."""
    return int.from_bytes(hmac.digest(secret, f"choose\x1f{seed}".encode(), "sha256")[:8], "big") >> 1


def read_secret(path: str | None) -> bytes | None:
    """Return the bytes of `privacy.secret`."""
    if path is None:
        return None
    with file_errors(f"privacy.secret {path}: cannot be read; `head -c 32 /dev/urandom > FILE` makes one"):
        secret = Path(path).read_bytes()
    if len(secret) < _LEAST:
        raise InputError(f"privacy.secret {path}: {len(secret)} bytes are no secret; allowed: {_LEAST} or more")
    return secret


# -- steps: clipping and noise; their `repr` is a format, as it seeds noise where there is a secret --------------------


@dataclass(frozen=True)
class Clip:
    """Scales a change whose norm exceeds `bound` down to it; any two are then at most `2·bound` apart."""

    bound: float
    norm: Norm

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """See `uplink.pipeline.UplinkStep`."""
        return clip_to_norm(change, self.bound, self.norm)


@dataclass(frozen=True)
class Laplace:
    """Adds an independent Laplace number of this scale to every coordinate, by the inverse distribution function."""

    scale: float

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """See `uplink.pipeline.UplinkStep`."""
        noised = {}
        for name, tensor in change.items():
            centered = draws.uniform("laplace", name, tuple(tensor.shape)) - 0.5
            noised[name] = tensor.double() - self.scale * centered.sign() * torch.log1p(-2 * centered.abs())
        return noised


def gaussian(uniform: Tensor, deviation: float) -> Tensor:
    """Turn uniform numbers in (0, 1) into Gaussian numbers, by the inverse of the distribution function."""
    normal: Tensor = torch.special.ndtri(uniform)
    return deviation * normal


@dataclass(frozen=True)
class Gaussian:
    """Adds an independent Gaussian number of this standard deviation to every coordinate."""

    deviation: float

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """See `uplink.pipeline.UplinkStep`."""
        return {
            name: tensor.double() + gaussian(draws.uniform("gaussian", name, tuple(tensor.shape)), self.deviation)
            for name, tensor in change.items()
        }


COORDINATOR = ":coordinator"


@dataclass(frozen=True)
class CentralNoise:
    """The mean of clipped changes plus Gaussian noise of `multiplier·clip / silos` per number (central privacy).

    The sum is divided by the number of silos of a round, not of updates: a missing or refused update counts as no
    change. Replacing one silo's rows then moves the mean by `2·clip / silos` at most (McMahan et al. 2018).

    Args:
        multiplier: z, the noise in units of `clip`.
        silos: the number of silos in a round.
        secret: the coordinator's secret; see `noise_stream_for`.
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
