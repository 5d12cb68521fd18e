"""Clipping and noise: on gradients of rows, on a silo's change, and by the coordinator on the mean of changes.

The numbers of noise and rounding are drawn from the run's seed, or from the secret file `privacy.secret`.

Noise derived from the seed is reproducible, but anyone who knows the seed can subtract it. A silo that needs protection
therefore has a secret. Its noise is then derived from the secret, the steps, the change, and all that the answer
depends on: the same question gets the same message. Two different changes (a repeated round with other parts), or one
change under two strengths of noise (another run with another ε), must never get the same noise: their difference would
be revealed. Nor may two questions (other broadcasts, other runs) whose changes are equal: that they are would be.
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
from numpy.typing import NDArray
from torch import Tensor

from silotune.aggregation.update import Update
from silotune.communication.privacy.integer_noise import (
    GAUSSIAN,
    LAPLACE,
    Law,
    grid_of,
    integer_vector,
    rounded_numbers,
)
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
        pieces = self._words(purpose, name, prod(shape)) >> np.uint64(12)
        return torch.from_numpy((pieces.astype(np.float64) + 0.5) * _PIECE).reshape(shape)

    def whole(self, purpose: str, name: str, shape: tuple[int, ...], scale: float, law: Law) -> Tensor:
        """Return independent numbers of a law, times `scale` and rounded, int64; see `rounded_numbers`."""
        if not scale:
            return torch.zeros(shape, dtype=torch.int64)

        def more(place: int) -> int:
            return int(self._words("more", f"{purpose}\x1f{name}\x1f{place}", 1)[0])

        return rounded_numbers(self._words(purpose, name, prod(shape)), more, scale, law)[0].reshape(shape)

    def _words(self, purpose: str, name: str, count: int) -> NDArray[np.uint64]:
        stream = hashlib.shake_256(f"{purpose}\x1f{name}\x1f".encode() + self._key).digest(8 * count)
        return np.frombuffer(stream, dtype="<u8")


def noise_stream_for(
    seed: int, secret: bytes | None, silo: str, round_number: int, change: Tensors, how: str, question: str = ""
) -> NoiseStream:
    """Return the stream of a silo in a round.

    With a secret, its key has the change, `how` it is noised, and the `question`, a digest of all that it depends on.
    """
    purpose = f"uplink\x1f{silo}\x1f{round_number}"
    if secret is None:
        return NoiseStream(hashlib.sha256(f"{purpose}\x1f{seed}".encode()).digest())
    return NoiseStream(hmac.digest(secret, f"{purpose}\x1f{how}\x1f{question}\x1f{digest(change)}".encode(), "sha256"))


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
    """Adds an independent Laplace number to every coordinate of a change of L1 norm at most `bound`."""

    scale: float
    bound: float

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """See `uplink.pipeline.UplinkStep`."""
        grid = grid_of(self.bound, self.scale)
        return with_noise(whole_tensors(change, self.bound, grid, "l1"), draws, self.scale, grid, "laplace")


@dataclass(frozen=True)
class Gaussian:
    """Adds an independent Gaussian number to every coordinate of a change of L2 norm at most `bound`."""

    deviation: float
    bound: float

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """See `uplink.pipeline.UplinkStep`."""
        grid = grid_of(self.bound, self.deviation)
        return with_noise(whole_tensors(change, self.bound, grid, "l2"), draws, self.deviation, grid, "gaussian")


@dataclass(frozen=True)
class BareNoise:
    """Adds an independent number of a law to every coordinate of a change without bound, which promises nothing."""

    scale: float
    law: str

    def __call__(self, change: Tensors, draws: NoiseStream) -> Tensors:
        """See `uplink.pipeline.UplinkStep`."""
        nothing = {name: torch.zeros_like(tensor, dtype=torch.int64) for name, tensor in change.items()}
        noise = with_noise(nothing, draws, self.scale, grid_of(self.scale, self.scale), self.law)
        return {name: tensor + noise[name] for name, tensor in change.items()}


def whole_tensors(tensors: Tensors, bound: float, grid: float, norm: Norm) -> Tensors:
    """Clip and round tensors as one vector; see `integer_vector`."""
    if not tensors:
        return {}
    vector = torch.cat([tensor.double().reshape(-1) for tensor in tensors.values()])
    pieces = torch.split(integer_vector(vector, bound, grid, norm), [tensor.numel() for tensor in tensors.values()])
    return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)}


_LAWS = {"gaussian": GAUSSIAN, "laplace": LAPLACE}


def with_noise(whole: Tensors, draws: NoiseStream, scale: float, grid: float, law: str, purpose: str = "") -> Tensors:
    """Add noise to whole numbers of `grid`, and return the sums in float64; arguments as of `with_integer_noise`."""
    noised = with_integer_noise(whole, draws, scale, grid, law, purpose)
    return {name: tensor.double() * grid for name, tensor in noised.items()}


def with_integer_noise(
    whole: Tensors, draws: NoiseStream, scale: float, grid: float, law: str, purpose: str = ""
) -> Tensors:
    """Add noise to whole numbers of `grid`, exactly: all noise on rows, silos and means is here.

    Args:
        whole: int64, sums of vectors that `integer_vector` rounded to this grid.
        draws: the stream of the noise.
        scale: standard deviation of Gaussian numbers, or scale of Laplace numbers; 0: no noise.
        grid: as `grid_of` returns it.
        law: `gaussian` or `laplace`.
        purpose: precedes the tensors' names in the draws.
    """
    return {
        name: tensor + draws.whole(law, purpose + name, tuple(tensor.shape), scale / grid, _LAWS[law]).to(tensor.device)
        for name, tensor in whole.items()
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
        run: a digest of the configuration, on which noise by a secret depends.
    """

    multiplier: float
    clip: float
    silos: int
    seed: int
    secret: bytes | None = None
    run: str = ""

    def __call__(self, before: Tensors, updates: Iterable[Update], round_number: int) -> Tensors:
        """Return the shared parts after a round; `updates` are in silo-name order."""
        deviation = self.multiplier * self.clip
        grid = grid_of(self.clip, deviation)
        total: Tensors = {name: torch.zeros_like(tensor, dtype=torch.int64) for name, tensor in before.items()}
        for update in updates:
            for name, tensor in whole_tensors(change_of(before, update.tensors), self.clip, grid, "l2").items():
                total[name] += tensor
        how, question = f"gaussian {deviation!r} on steps of {grid!r}", f"{self.run}\x1f{digest(before)}"
        draws = noise_stream_for(self.seed, self.secret, COORDINATOR, round_number, total, how, question)
        noised = with_noise(total, draws, deviation, grid, "gaussian")
        return {name: (tensor.double() + noised[name] / self.silos).to(tensor.dtype) for name, tensor in before.items()}
