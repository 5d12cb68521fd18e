"""The random numbers of the uplink: a stream of bytes from a key, the same on every machine.

Derived from the seed, noise is a part of the experiment: the same run gives the same bits, and whoever knows the seed
can subtract it. So a silo that really wants to hide something has a secret of its own. Its noise is then derived from
the secret, *from what is noised* and from how: the same answer sent twice reveals nothing twice. Two different changes
(the coordinator repeats a round with other parts), or one change under two strengths of noise (another run with another
ε), never wear the same noise: what they differ in would lay both bare.
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

    def uniform(self, purpose: str, name: str, shape: tuple[int, ...]) -> Tensor:
        """Float64 in (0, 1), neither end ever: the middles of 2⁵² equal pieces, all of which float64 holds exactly."""
        stream = hashlib.shake_256(f"{purpose}\x1f{name}\x1f".encode() + self._key).digest(8 * prod(shape))
        pieces = np.frombuffer(stream, dtype="<u8") >> np.uint64(12)
        return torch.from_numpy((pieces.astype(np.float64) + 0.5) * _PIECE).reshape(shape)


def draws(seed: int, secret: bytes | None, silo: str, number: int, change: Tensors, how: str) -> NoiseStream:
    """The draws of a silo in a round.

    Args:
        seed: the run's.
        secret: the silo's own; None: the seed decides, reproducibly.
        silo: its name; the coordinator's noise has a name of its own.
        number: the round.
        change: what is noised, and
        how: by what steps and how strong, in words; both decide only where there is a secret.
    """
    purpose = f"uplink\x1f{silo}\x1f{number}"
    if secret is None:
        return NoiseStream(hashlib.sha256(f"{purpose}\x1f{seed}".encode()).digest())
    return NoiseStream(hmac.digest(secret, f"{purpose}\x1f{how}\x1f{digest(change)}".encode(), "sha256"))


def secret_seed(seed: int, secret: bytes) -> int:
    """A seed for what only the coordinator may know: which silos take part, where central noise counts on it."""
    return int.from_bytes(hmac.digest(secret, f"choose\x1f{seed}".encode(), "sha256")[:8], "big") >> 1


def read_secret(path: str | None) -> bytes | None:
    """The bytes of `privacy.secret`.

    Raises:
        InputError: it cannot be read, or is too short to be one.
    """
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
