"""A silo's side of one sum under masks: five answers, each given once, and a refusal by name of anything else.

Every stage shows the silo a text of each of some silos, and it tells a text for each of some, in hexadecimal digits:

1. `offer`: shown nothing, it tells a seal key and each round's mask key, signed for the agreement's `keys`.
2. `share`: shown all members' keys, it tells each peer's shares of each round's two seeds, sealed for that peer.
3. `mask`: shown the shares for it, it gives its summand under its own mask and one for every peer that sent shares.
4. `consent`: shown the survivors, each with no text, it tells its signature of their list, stored by then.
5. `unmask`: shown their signatures, it tells its share of each survivor's own mask, and of each other peer's mask key.

By then it has no more use for the round's seeds and shares, and keeps only what it told. The first two stages are gone
through once for all rounds of the agreement, the others once for each.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from silotune.communication.masks import keys
from silotune.communication.masks.agreement import Agreement, MasksRefused, Peers, sign
from silotune.communication.masks.keys import SEED_BYTES

STAGES = ("offer", "share", "mask", "consent", "unmask")

Texts = dict[str, str]

StageAnswer = tuple[Texts, bytes]
"""What is told, and the masked summand; empty in all stages but one."""


@dataclass
class SiloRound:
    """One attempt of one silo at the sums of one round, or of several whose keys are made together.

    Args:
        name: the silo's.
        identity: its private key, 32 bytes.
        peers: its pinned list.
        agreement: as the silo itself knows it, of the attempt and the members that the coordinator proposes; in the
            first two stages its `keys` are enough.
        summand: what it adds to the sum, int64; nothing in the first two stages.
        ledger: stores survivors before they are signed; refuses a list where another one was signed for the broadcast.
        kept: all that later answers in the attempt depend on; the caller stores it before an answer leaves.
    """

    name: str
    identity: bytes
    peers: Peers
    agreement: Agreement
    summand: Tensor
    ledger: Callable[[Agreement, list[str]], None]
    kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        members, rounds = self.agreement.members, self.agreement.rounds
        ghosts = [member for member in members if member not in self.peers.keys]
        if ghosts:
            raise MasksRefused(f"silo {ghosts[0]!r:.60} is not in this silo's pinned list (masked.peers)")
        if self.name not in members:
            raise MasksRefused(f"the sum is of {', '.join(members)}, without this silo")
        self.peers.require_enough("members", members)
        self.kept.setdefault("seal", secrets.token_hex(SEED_BYTES))
        self.kept.setdefault("seeds", [[secrets.token_hex(SEED_BYTES) for _ in range(2)] for _ in range(rounds)])
        self._keys, of_rounds = self.agreement.keys, self.kept.setdefault("rounds", {})
        self._round: dict[str, Any] = of_rounds.setdefault(str(self.agreement.place), {})

    def answer(self, stage: str, request: Texts) -> StageAnswer:
        """Answer the coordinator in one of `STAGES`.

        Raises:
            MasksRefused: saying which rule of the protocol the request breaks.
        """
        if stage not in STAGES:
            raise MasksRefused(f"no such stage: {stage!r:.40}")
        if "told" in self._round and stage != "unmask":
            raise MasksRefused(f"{stage}: asked after the last stage of the attempt")
        if not {*STAGES[1 : STAGES.index(stage)]} <= {*self.kept, *self._round}:
            raise MasksRefused(f"{stage}: asked before the stages that come first")
        if stage in STAGES[2:]:
            digest = self.agreement.digest.hex()
            self._once(self._round, "agreement", digest, "another agreement; a mask key is of one sum")
        try:
            reply = getattr(self, f"_{stage}")(dict(request))
        except (LookupError, TypeError, ValueError) as error:
            raise MasksRefused(f"{stage}: a malformed request ({type(error).__name__})") from error
        return ({}, reply) if isinstance(reply, bytes) else (reply, b"")

    def _key(self, seed: str, purpose: str) -> X25519PrivateKey:
        return keys.exchange_key(bytes.fromhex(seed), self._keys.digest, purpose)

    def _offer(self, _: Texts) -> Texts:
        if "offer" not in self.kept:
            own = [self._key(self.kept["seal"], "seal"), *(self._key(seed, "mask") for _, seed in self.kept["seeds"])]
            offered = b"".join(map(keys.public_bytes, own))
            signature = sign(self.identity, self._keys.text("keys", self.name, offered.hex()))
            self.kept["offer"] = (offered + signature).hex()
        return {self.name: self.kept["offer"]}

    def _share(self, offers: Texts) -> Texts:
        self.peers.require_enough("members with keys", offers)
        if not self._offer({}).items() <= offers.items():
            raise MasksRefused("the keys that are shown as this silo's are not its own")
        for name, offer in offers.items():
            if name not in self.agreement.members:
                raise MasksRefused(f"keys of silo {name!r:.60}, which is no member of the sum")
            offered, signature = keys.parts_of_offer(offer)
            otherwise = (
                f"the keys of silo {name!r} are not signed by it for this run, round, attempt, configuration, list of "
                "members and noise"
            )
            text = self._keys.text("keys", name, b"".join(offered).hex())
            self.peers.require_signed(name, signature, text, otherwise)
        self._once(self.kept, "share", offers, "other keys of the members")
        if "sealed" not in self.kept:
            holders, threshold = sorted(offers), self.agreement.threshold
            pairs = [
                keys.split(bytes.fromhex(seed), threshold, holders) for pair in self.kept["seeds"] for seed in pair
            ]
            shares = {holder: b"".join(each[holder] for each in pairs) for holder in holders}
            self.kept["shares"] = {self.name: _by_round(shares.pop(self.name))}
            self.kept["sealed"] = {
                peer: keys.seal(self._key_between(self.name, peer), share, self._keys.digest).hex()
                for peer, share in shares.items()
            }
        return dict(self.kept["sealed"])

    def _key_between(self, sender: str, receiver: str) -> bytes:
        """Return the key of the one message from this silo to a peer, or from a peer to it."""
        (theirs, *_), _ = keys.parts_of_offer(self.kept["share"][receiver if sender == self.name else sender])
        own = self._key(self.kept["seal"], "seal")
        return keys.pair_key(own, theirs, self._keys.digest, "seal", sender, receiver)

    def _mask(self, sealed: Texts) -> bytes:
        self.peers.require_enough("members with shares", {self.name, *sealed})
        place, digest = self.agreement.place, self.agreement.digest
        numbers = np.asarray(self.summand.numpy()).view(np.uint64)
        seed, of_key = self.kept["seeds"][place]
        masked = numbers + keys.self_mask(bytes.fromhex(seed), digest, len(numbers))
        own, shares = self._key(of_key, "mask"), {**self.kept["shares"]}
        for peer, data in sealed.items():
            shares[peer] = self._opened(peer, data)
            theirs, _ = keys.parts_of_offer(self.kept["share"][peer])
            masked += keys.pair_mask(own, self.name, theirs[1 + place], peer, digest, len(numbers))
        self._once(self._round, "mask", sorted({self.name, *sealed}), "shares of other members")
        self._once(self._round, "summand", hashlib.sha256(numbers.tobytes()).hexdigest(), "another summand")
        self.kept |= {"shares": shares, "seal": ""}
        return masked.astype("<u8").tobytes()

    def _opened(self, peer: str, sealed: str) -> list[list[str]]:
        """Return a peer's shares for this silo, which came with this round or an earlier one of the agreement."""
        if peer in self.kept["sealed"] and peer in self.kept["shares"]:
            return list(self.kept["shares"][peer])
        opened = b""
        if peer in self.kept["sealed"] and self.kept["seal"]:
            opened = keys.unseal(self._key_between(peer, self.name), bytes.fromhex(sealed), self._keys.digest)
        if len(opened) != 2 * SEED_BYTES * self.agreement.rounds:
            raise MasksRefused(f"the shares of silo {peer!r:.60} were not sealed by it for this silo and this sum")
        return _by_round(opened)

    def _consent(self, request: Texts) -> Texts:
        survivors = sorted(request)
        if not {*survivors} <= {*self._round["mask"]}:
            raise MasksRefused("survivors: must be members with shares")
        if self.name not in survivors:
            raise MasksRefused("survivors: without this silo, which has sent its summand")
        self.peers.require_enough("survivors", survivors)
        self._once(self._round, "consent", survivors, "another list of survivors")
        self.ledger(self.agreement, survivors)
        return {self.name: sign(self.identity, self.agreement.text("survivors", survivors)).hex()}

    def _unmask(self, signatures: Texts) -> Texts:
        survivors, place = self._round["consent"], self.agreement.place
        if sorted(signatures) != survivors:
            raise MasksRefused(
                f"asked to unmask for other survivors than this silo has signed ({', '.join(survivors)}): of a peer it "
                "tells its share of the seed or that of the key, never both"
            )
        if "told" in self._round:
            return dict(self._round["told"])
        signed = {name: bytes.fromhex(signature) for name, signature in signatures.items() if signature}
        text = self.agreement.text("survivors", survivors)
        for name, signature in signed.items():
            self.peers.require_signed(name, signature, text, f"silo {name!r} has not signed this list of survivors")
        if len(signed) < self.agreement.threshold:
            raise MasksRefused(f"{len(signed)} silos have signed the survivors; t = {self.agreement.threshold}")
        both = {name: self.kept["shares"][name][place] for name in self._round["mask"]}
        shares = {name: of_seed if name in survivors else of_key for name, (of_seed, of_key) in both.items()}
        self._round |= {"told": shares}
        self.kept["seeds"][place] = ["", ""]
        for each in self.kept["shares"].values():
            each[place] = ["", ""]
        return dict(shares)

    def _once(self, record: dict[str, Any], name: str, value: object, what: str) -> None:
        """Keep what a stage was asked with; refuse to go through it a second time with something else."""
        if record.setdefault(name, value) != value:
            raise MasksRefused(f"asked again in the same attempt with {what}")


def _by_round(shares: bytes) -> list[list[str]]:
    """Return one silo's shares of another's seeds: for each round of the own mask's seed, and of the mask key's."""
    text, size = shares.hex(), 2 * SEED_BYTES
    return [[text[at : at + size], text[at + size : at + 2 * size]] for at in range(0, len(text), 2 * size)]
