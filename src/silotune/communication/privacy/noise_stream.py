"""Draw the numbers of noise and rounding from the run's seed, or from the secret file `privacy.secret`.

Noise derived from the seed is reproducible, but anyone who knows the seed can subtract it. A silo that needs protection
therefore has a secret. Its noise is then derived from the secret, the change and the steps: sending the same change
twice gives the same message. Two different changes (a repeated round with other parts), or one change under two
strengths of noise (another run with another ε), must never get the same noise: their difference would be revealed.
"""

from __future__ import annotations

import hashlib
import hmac
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from silotune.core.tensors import Tensors, digest
from silotune.errors import InputError

_LEAST = 16

_PIECE = 2.0**-52


class NoiseStream:
    """Uniform numbers for one silo and round, by purpose."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @property
    def word(self) -> str:
        """A word of the stream, for draws of torch's own generators."""
        return hashlib.sha256(b"word\x1f" + self._key).hexdigest()

    def uniform(self, purpose: str, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return float64 numbers in (0, 1), ends excluded: the middles of 2⁵² equal pieces, exact in float64."""
        stream = hashlib.shake_256(f"{purpose}\x1f{name}\x1f".encode() + self._key).digest(8 * prod(shape))
        pieces = np.frombuffer(stream, dtype="<u8") >> np.uint64(12)
        return torch.from_numpy((pieces.astype(np.float64) + 0.5) * _PIECE).reshape(shape)


def noise_stream_for(
    seed: int, secret: bytes | None, silo: str, round_number: int, change: Tensors, how: str
) -> NoiseStream:
    """Return the stream of a silo in a round.

    Args:
        seed: the run's seed, used without a secret.
        secret: the silo's secret, or None.
        silo: the silo's name, or `central_noise.COORDINATOR`.
        round_number: the round.
        change: the tensors to be noised; part of the key with a secret.
        how: the steps and their strength; part of the key with a secret.
    """
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
    try:
        secret = Path(path).read_bytes()
    except OSError as error:
        raise InputError(
            f"privacy.secret {path}: cannot be read ({error.strerror}); `head -c 32 /dev/urandom > FILE` makes one"
        ) from error
    if len(secret) < _LEAST:
        raise InputError(f"privacy.secret {path}: {len(secret)} bytes are no secret; allowed: {_LEAST} or more")
    return secret
