"""A silo's side of one sum under masks: five answers, each given once, and a refusal by name of anything else.

Every stage shows the silo a text of each of some silos, and it tells a text for each of some, in hexadecimal digits:

1. `offer`: shown nothing, it tells its round keys, signed for the agreement.
2. `share`: shown all members' keys, it tells each peer's shares of its two seeds, sealed for that peer.
3. `mask`: shown the shares for it, it gives its summand under its own mask and one for every peer that sent shares.
4. `consent`: shown the survivors, each with no text, it tells its signature of their list, stored by then.
5. `unmask`: shown their signatures, it tells its share of each survivor's own mask, and of each other peer's mask key.

By then it has no more use for seeds and shares, and keeps only what it told.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from silotune.communication.masks import keys
from silotune.communication.masks.agreement import Agreement, MasksRefused, Peers, sign
from silotune.communication.masks.keys import SEED_BYTES

STAGES = ("offer", "share", "mask", "consent", "unmask")

Texts = dict[str, str]

Answer = tuple[Texts, bytes]
"""What is told, and the masked summand; empty in all stages but one."""


@dataclass
class SiloRound:
    """One attempt of one silo at one sum.

    Args:
        name: the silo's.
        identity: its private key, 32 bytes.
        peers: its pinned list.
        agreement: as the silo itself knows it, of the attempt and the members that the coordinator proposes.
        summand: what it adds to the sum, int64.
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
        members = self.agreement.members
        if "told" in self.kept:  # in the last stage seeds are erased
            return
        ghosts = [member for member in members if member not in self.peers.keys]
        if ghosts:
            raise MasksRefused(f"silo {ghosts[0]!r:.60} is not in this silo's pinned list (masked.peers)")
        if self.name not in members:
            raise MasksRefused(f"the sum is of {', '.join(members)}, without this silo")
        self.peers.require_enough("members", members)
        self.kept.setdefault("seeds", [secrets.token_hex(SEED_BYTES) for _ in range(3)])
        self._seeds, self._digest = [bytes.fromhex(seed) for seed in self.kept["seeds"]], self.agreement.digest
        self._mask_key = keys.exchange_key(self._seeds[1], self._digest, "mask")
        self._seal_key = keys.exchange_key(self._seeds[2], self._digest, "seal")

    def answer(self, stage: str, shown: Texts) -> Answer:
        """Answer the coordinator in one of `STAGES`.

        Raises:
            MasksRefused: saying which rule of the protocol the request breaks.
        """
        if stage not in STAGES:
            raise MasksRefused(f"no such stage: {stage!r:.40}")
        if "told" in self.kept and stage != "unmask":
            raise MasksRefused(f"{stage}: asked after the last stage of the attempt")
        if "told" not in self.kept and not {*STAGES[1 : STAGES.index(stage)]} <= self.kept.keys():
            raise MasksRefused(f"{stage}: asked before the stages that come first")
        try:
            told = getattr(self, f"_{stage}")(dict(shown))
        except (KeyError, TypeError, ValueError) as error:
            raise MasksRefused(f"{stage}: a malformed request ({type(error).__name__})") from error
        return ({}, told) if isinstance(told, bytes) else (told, b"")

    def _offer(self, _: Texts) -> Texts:
        seal, mask = keys.public_bytes(self._seal_key), keys.public_bytes(self._mask_key)
        signature = sign(self.identity, self.agreement.text("keys", self.name, seal.hex(), mask.hex()))
        return {self.name: (seal + mask + signature).hex()}

    def _share(self, offers: Texts) -> Texts:
        self.peers.require_enough("members with keys", offers)
        if not self._offer({}).items() <= offers.items():
            raise MasksRefused("the keys that are shown as this silo's are not its own")
        for name, offer in offers.items():
            if name not in self.agreement.members:
                raise MasksRefused(f"keys of silo {name!r:.60}, which is no member of the sum")
            seal, mask, signature = keys.parts_of_offer(offer)
            otherwise = (
                f"the keys of silo {name!r} are not signed by it for this run, round, attempt, configuration, "
                "broadcast and list of members"
            )
            text = self.agreement.text("keys", name, seal.hex(), mask.hex())
            self.peers.require_signed(name, signature, text, otherwise)
        self._once("share", offers, "other keys of the members")
        if "sealed" not in self.kept:
            holders = sorted(offers)
            both = [keys.split(seed, self.agreement.threshold, holders) for seed in self._seeds[:2]]
            shares = {holder: b"".join(each[holder] for each in both) for holder in holders}
            self.kept["own"] = shares.pop(self.name).hex()
            self.kept["sealed"] = {
                peer: keys.seal(self._key_between(self.name, peer), share, self._digest).hex()
                for peer, share in shares.items()
            }
        return dict(self.kept["sealed"])

    def _key_between(self, sender: str, receiver: str) -> bytes:
        """Return the key of the one message from this silo to a peer, or from a peer to it."""
        theirs, _, _ = keys.parts_of_offer(self.kept["share"][receiver if sender == self.name else sender])
        return keys.pair_key(self._seal_key, theirs, self._digest, "seal", sender, receiver)

    def _mask(self, sealed: Texts) -> bytes:
        self.peers.require_enough("members with shares", {self.name, *sealed})
        shares = {self.name: self.kept["own"]}
        numbers = np.asarray(self.summand.numpy()).view(np.uint64)
        masked = numbers + keys.self_mask(self._seeds[0], self._digest, len(numbers))
        for peer, data in sealed.items():
            opened = b""
            if peer in self.kept["sealed"]:
                opened = keys.unseal(self._key_between(peer, self.name), bytes.fromhex(data), self._digest)
            if len(opened) != 2 * SEED_BYTES:
                raise MasksRefused(f"the shares of silo {peer!r:.60} were not sealed by it for this silo and this sum")
            shares[peer] = opened.hex()
            _, theirs, _ = keys.parts_of_offer(self.kept["share"][peer])
            masked += keys.pair_mask(self._mask_key, self.name, theirs, peer, self._digest, len(numbers))
        self._once("mask", shares, "shares of other members")
        self._once("summand", hashlib.sha256(numbers.tobytes()).hexdigest(), "another summand")
        return masked.astype("<u8").tobytes()

    def _consent(self, shown: Texts) -> Texts:
        survivors = sorted(shown)
        if not shown.keys() <= self.kept["mask"].keys():
            raise MasksRefused("survivors: must be members with shares")
        if self.name not in survivors:
            raise MasksRefused("survivors: without this silo, which has sent its summand")
        self.peers.require_enough("survivors", survivors)
        self._once("consent", survivors, "another list of survivors")
        self.ledger(self.agreement, survivors)
        return {self.name: sign(self.identity, self.agreement.text("survivors", survivors)).hex()}

    def _unmask(self, signatures: Texts) -> Texts:
        survivors = self.kept["consent"]
        if sorted(signatures) != survivors:
            raise MasksRefused(
                f"asked to unmask for other survivors than this silo has signed ({', '.join(survivors)}): of a peer it "
                "tells its share of the seed or that of the key, never both"
            )
        if "told" in self.kept:
            return dict(self.kept["told"])
        signed = {name: bytes.fromhex(signature) for name, signature in signatures.items() if signature}
        text = self.agreement.text("survivors", survivors)
        for name, signature in signed.items():
            self.peers.require_signed(name, signature, text, f"silo {name!r} has not signed this list of survivors")
        if len(signed) < self.agreement.threshold:
            raise MasksRefused(f"{len(signed)} silos have signed the survivors; t = {self.agreement.threshold}")
        half = 2 * SEED_BYTES  # in hexadecimal digits
        told = {name: key[:half] if name in survivors else key[half:] for name, key in self.kept["mask"].items()}
        self.kept.clear()
        self.kept |= {"consent": survivors, "told": told}
        return dict(told)

    def _once(self, name: str, value: object, what: str) -> None:
        """Keep what a stage was asked with; refuse to go through it a second time with something else."""
        if self.kept.setdefault(name, value) != value:
            raise MasksRefused(f"asked again in the same attempt with {what}")
