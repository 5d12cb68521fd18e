"""What all silos of a sum must agree on, the pinned list of their identities, and how many of them it takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from silotune.communication.masks.fixed_point import FEWEST_SILOS, MOST_SILOS
from silotune.errors import InputError


class MasksRefused(InputError):
    """A silo's refusal to go on with a sum under masks; nothing leaves."""


def threshold_of(silos: int) -> int:
    """Return t, how many silos must help to take off masks: more than two thirds of the pinned list."""
    return 2 * silos // 3 + 1


@dataclass(frozen=True)
class Peers:
    """The pinned list: name → Ed25519 public key of every silo, this one included, and how few may be summed.

    Args:
        keys: the list, as the silos' operators compared it outside the coordinator.
        least: the fewest members and survivors of a sum that this silo takes part in; None: t.
    """

    keys: Mapping[str, bytes]
    least: int | None = None

    def __post_init__(self) -> None:
        count = len(self.keys)
        if not FEWEST_SILOS <= count <= MOST_SILOS:
            raise InputError(f"masked.peers: {count} silos; the list has {FEWEST_SILOS} to {MOST_SILOS}")
        if len({*self.keys.values()}) < count:
            raise InputError("masked.peers: two silos have the same key")
        if not self.threshold <= self.fewest <= count:
            raise InputError(f"masked.least: must be between {self.threshold} and {count} (got {self.least})")

    @property
    def threshold(self) -> int:
        """T of the list."""
        return threshold_of(len(self.keys))

    @property
    def fewest(self) -> int:
        """The fewest members and survivors of a sum."""
        return self.threshold if self.least is None else self.least

    @property
    def colluders(self) -> int:
        """How many silos may help a lying coordinator without one silo's change coming out.

        They can neither have two survivor lists signed, nor gather both shares of a peer (2t − n − 1), and at least
        two honest silos are left in the smallest sum.
        """
        return min(2 * self.threshold - len(self.keys) - 1, self.fewest - 2)

    @property
    def fingerprint(self) -> str:
        """The sha256 of the list, for people to compare."""
        listed = sorted((name, key.hex()) for name, key in self.keys.items())
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    def verify(self, silo: str, signature: bytes, text: bytes) -> bool:
        """Return whether a silo of the list has signed a text."""
        try:
            Ed25519PublicKey.from_public_bytes(self.keys[silo]).verify(signature, text)
        except InvalidSignature:
            return False
        return True


_LABELS = {"config": "configuration", "tensors": "broadcast", "peers": "list of peers", "threshold": "t"}


@dataclass(frozen=True)
class Agreement:
    """What the keys of one sum are signed for; a peer who signed for another one is refused.

    Args:
        run: the run's id.
        round: its number.
        attempt: drawn by the coordinator for every attempt of a round.
        config: digest of the configuration.
        broadcast: digest of the message that opened the round.
        tensors: digest of its tensors alone, whatever the round's number.
        numbers: how many a summand has.
        members: the silos of the sum, in name order.
        peers: fingerprint of the pinned list.
        threshold: t.
    """

    run: str
    round: int
    attempt: str
    config: str
    broadcast: str
    tensors: str
    numbers: int
    members: tuple[str, ...]
    peers: str
    threshold: int

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Agreement:
        """Return the agreement that a coordinator proposes."""
        read = cls(**{field.name: values[field.name] for field in fields(cls)} | {"members": tuple(values["members"])})
        if not all(isinstance(name, str) for name in read.members) or read.members != tuple(sorted({*read.members})):
            raise MasksRefused("members: must be different names, in order")
        return read

    def values(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    def text(self, purpose: str, *more: object) -> bytes:
        """Return what is signed: a purpose, the agreement, and further values."""
        return json.dumps([f"silotune masks: {purpose}", self.values(), *more], sort_keys=True).encode()

    @property
    def digest(self) -> bytes:
        """The sha256 of all of it, which is in the derivation of every key."""
        return hashlib.sha256(self.text("agreement")).digest()

    def require_own(self, own: Agreement) -> None:
        """Refuse a proposal that differs from what this silo knows; the first difference is named."""
        for name, value in own.values().items():
            proposed = getattr(self, name)
            if proposed != value:
                label = _LABELS.get(name, name)
                raise MasksRefused(
                    f"asked for a sum of another {label}: {_short(proposed)}, here it is {_short(value)}"
                )

    def require_members(self, peers: Peers) -> None:
        """Refuse ghosts, too few members, and a t below that of the pinned list."""
        ghosts = [name for name in self.members if name not in peers.keys]
        if ghosts:
            raise MasksRefused(f"silo {ghosts[0]!r:.60} is not in this silo's pinned list (masked.peers)")
        require_enough("members", self.members, peers)
        if self.threshold != peers.threshold:
            raise MasksRefused(f"t = {self.threshold!r:.20}; of {len(peers.keys)} pinned silos it is {peers.threshold}")


def require_enough(what: str, silos: Sequence[str], peers: Peers) -> None:
    """Refuse fewer silos than the operator's `masked.least`."""
    if len(silos) < peers.fewest:
        raise MasksRefused(
            f"{len(silos)} {what}; this silo takes part in sums of at least {peers.fewest} of its {len(peers.keys)} "
            "pinned silos (masked.least)"
        )


def sign(identity: bytes, text: bytes) -> bytes:
    """Return a signature by an identity's private key, 32 bytes."""
    return Ed25519PrivateKey.from_private_bytes(identity).sign(text)


def public_identity(identity: bytes) -> bytes:
    """Return the public key of an identity, 32 bytes."""
    return Ed25519PrivateKey.from_private_bytes(identity).public_key().public_bytes_raw()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 20 else f"{text[:12]}…"
