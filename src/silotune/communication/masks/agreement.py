"""What all silos of a sum must agree on, the pinned list of their identities, and how many of them it takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from silotune.communication.masks.fixed_point import FEWEST_SILOS, MOST_SILOS, most_colluders, threshold_of
from silotune.errors import InputError

FIRST = "first"
"""The `base` of an agreement whose members have not trained in the run."""


MOST_ROUNDS = 16
"""The most rounds whose keys are made together."""


def rounds_of_keys(number: int, rounds: int) -> int:
    """Return for how many rounds keys are made in a round of a run of so many."""
    return min(MOST_ROUNDS, rounds - number + 1)


def base_after(base: str, number: int, recipe: str, broadcast: str) -> str:
    """Return the `base` of the round after this one: its number, and the digest of all that the state was made from.

    Two silos with the same base have started alike and then had the same broadcasts under the same configuration.

    Args:
        base: that of this round.
        number: of this round.
        recipe: digest of the configuration without what may change within a run.
        broadcast: digest of the tensors that opened this round.
    """
    text = json.dumps([base, number, recipe, broadcast])
    return f"{number} {hashlib.sha256(text.encode()).hexdigest()}"


class MasksRefused(InputError):
    """A silo's refusal to go on with a sum under masks; nothing leaves."""


@dataclass(frozen=True)
class Peers:
    """The pinned list: name → Ed25519 public key of every silo, this one included, and how few may be summed.

    Args:
        keys: the list, as the silos' operators compared it outside the coordinator.
        least: the fewest silos with which a sum may start or end; if None, t.
        assumed: where silos share one noise, how many of them may spy, help the coordinator or add none.
    """

    keys: Mapping[str, bytes]
    least: int | None = None
    assumed: int = 1

    def __post_init__(self) -> None:
        count = len(self.keys)
        if not FEWEST_SILOS <= count <= MOST_SILOS:
            raise InputError(f"masked.peers: {count} silos; the list has {FEWEST_SILOS} to {MOST_SILOS}")
        if len({*self.keys.values()}) < count:
            raise InputError("masked.peers: two silos have the same key")
        if not self.threshold <= self.fewest <= count:
            raise InputError(f"masked.least: must be between {self.threshold} and {count} (got {self.least})")
        if self.assumed > self.colluders:
            raise InputError(
                f"masked.colluders: at most {self.colluders}, in sums of {self.fewest} (got {self.assumed})"
            )

    @property
    def threshold(self) -> int:
        """T of the list."""
        return threshold_of(len(self.keys))

    @property
    def fewest(self) -> int:
        """The fewest silos with which a sum may start or end."""
        return self.least or self.threshold

    @property
    def colluders(self) -> int:
        """How many silos may help a lying coordinator without one silo's change coming out; see `most_colluders`."""
        return most_colluders(len(self.keys), self.fewest)

    @property
    def fingerprint(self) -> str:
        """The sha256 of the list, of how few may be summed, and of colluders if not 1, for people to compare."""
        listed = sorted((name, key.hex()) for name, key in self.keys.items())
        more = [] if self.assumed == 1 else [self.assumed]
        return hashlib.sha256(json.dumps([self.fewest, listed, *more]).encode()).hexdigest()

    def require_enough(self, what: str, silos: Collection[str]) -> None:
        """Refuse fewer silos than the operator's `masked.least`."""
        if len(silos) < self.fewest:
            raise MasksRefused(
                f"{len(silos)} {what}; this silo takes part in sums of at least {self.fewest} of its {len(self.keys)} "
                "pinned silos (masked.least)"
            )

    def require_signed(self, silo: str, signature: bytes, text: bytes, otherwise: str) -> None:
        """Refuse, in these words, a text that a silo of the list has not signed."""
        try:
            Ed25519PublicKey.from_public_bytes(self.keys[silo]).verify(signature, text)
        except InvalidSignature as error:
            raise MasksRefused(otherwise) from error


@dataclass(frozen=True)
class Agreement:
    """What the masks of one sum are drawn for, and its survivors signed; what a peer has for another does not fit.

    `attempt` is drawn by the coordinator anew for every attempt of a round. `configuration`, `broadcast` and
    `pinned_list` are digests: of the configuration as it was sent, of the tensors that opened the round, and of the
    list of peers. `base` is the state that all members started from: `FIRST`, or the last round as `base_after` writes
    it. `numbers` counts those of a summand, and `members` are in name order. `noise` is what silos share
    (`SharedNoise.text`), empty where they share none. Keys of `rounds` rounds from `first` on are made together, one
    for each; 0 is the sum's own round.
    """

    run: str
    round: int
    attempt: str
    configuration: str
    broadcast: str
    base: str
    numbers: int
    members: list[str]
    pinned_list: str
    threshold: int
    noise: str = ""
    first: int = 0
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.round not in self.together or self.rounds > MOST_ROUNDS:
            raise MasksRefused(f"keys of {self.rounds} rounds from {self.first} on are none of round {self.round}")

    @property
    def together(self) -> range:
        """The rounds whose keys are made together."""
        first = self.first or self.round
        return range(first, first + self.rounds)

    def has_keys(self, number: int, members: Sequence[str]) -> bool:
        """Whether its keys are of this round, too, if these are its members."""
        return self.members == members and number in self.together

    @property
    def place(self) -> int:
        """The place of the sum's round among them."""
        return self.together.index(self.round)

    @property
    def keys(self) -> Agreement:
        """What keys are made and signed for, the same for all their rounds, before their broadcasts are known."""
        return replace(self, round=self.together[0], broadcast="", base="", numbers=0)

    def text(self, purpose: str, *more: object) -> bytes:
        """Return what is signed: a purpose, the agreement, and further values."""
        return json.dumps([f"silotune masks: {purpose}", asdict(self), *more], sort_keys=True).encode()

    @property
    def digest(self) -> bytes:
        """The sha256 of all of it, which is in the derivation of every mask, and that of `keys` in every key's."""
        return hashlib.sha256(self.text("agreement")).digest()

    def require_same(self, proposed: Mapping[str, Any]) -> None:
        """Refuse a proposal that is not this agreement, the silo's own; the first difference is named."""
        for name, own in asdict(self).items():
            if (other := proposed.get(name)) != own:
                label = name.replace("_", " ")
                raise MasksRefused(f"asked for a sum of another {label}: {other!s:.20}, here it is {own!s:.20}")


def sign(identity: bytes, text: bytes) -> bytes:
    """Sign a text with an identity's private key of 32 bytes (Ed25519); the signature has 64 bytes."""
    return Ed25519PrivateKey.from_private_bytes(identity).sign(text)


def public_identity(identity: bytes) -> bytes:
    """Return the public key of an identity, 32 bytes."""
    return Ed25519PrivateKey.from_private_bytes(identity).public_key().public_bytes_raw()
