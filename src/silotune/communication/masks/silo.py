"""A silo's side of one sum under masks: five answers, each given once, and a refusal by name of anything else.

1. `offer`: its round keys, signed for the agreement.
2. `share`: shares of its two seeds, sealed for each peer whose signed keys it was shown.
3. `mask`: its summand under its own mask and one for every peer that has sent it shares.
4. `consent`: its signature of the list of survivors, which the ledger has stored by then.
5. `unmask`: of each survivor its share of the seed of the own mask; of each other peer that of the mask key's seed.

Everything that later answers depend on is in `kept`, which the caller stores before an answer leaves.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from silotune.communication.masks.agreement import Agreement, MasksRefused, Peers, require_enough, sign
from silotune.communication.masks.keys import (
    SEED_BYTES,
    Numbers,
    exchange_key,
    pair_key,
    pair_mask,
    public_bytes,
    seal,
    self_mask,
    split,
    unseal,
)

STAGES = ("offer", "share", "mask", "consent", "unmask")

Fields = Mapping[str, Any]

Answer = tuple[dict[str, Any], bytes]
"""Plain values, and the masked summand; empty in all stages but one."""

Ledger = Callable[[Agreement, list[str]], None]
"""Called with the survivors before they are signed; refuses a list where another one was signed for the tensors."""


class SiloRound:
    """One attempt of one silo at one sum.

    Args:
        name: the silo's.
        identity: its private key, 32 bytes.
        peers: its pinned list.
        agreement: as the coordinator proposes it, compared with what the silo knows.
        ledger: stores survivor lists.
        kept: of an earlier answer in this attempt; empty at first.
    """

    def __init__(
        self, name: str, identity: bytes, peers: Peers, agreement: Agreement, ledger: Ledger, kept: Fields | None = None
    ) -> None:
        agreement.require_members(peers)
        if name not in agreement.members:
            raise MasksRefused(f"the sum is of {', '.join(agreement.members)}, without this silo")
        self.name, self.peers, self.agreement = name, peers, agreement
        self.kept: dict[str, Any] = dict(kept or {"seeds": [secrets.token_hex(SEED_BYTES) for _ in range(3)]})
        self._identity, self._ledger, self._digest = identity, ledger, agreement.digest
        self._seal_seed, self._mask_seed, self._own_seed = map(bytes.fromhex, self.kept["seeds"])
        self._seal = exchange_key(self._seal_seed, self._digest, "seal")
        self._mask = exchange_key(self._mask_seed, self._digest, "mask")

    def answer(self, stage: str, asked: Fields, summand: Numbers) -> Answer:
        """Answer the coordinator.

        Args:
            stage: of `STAGES`.
            asked: its request.
            summand: what the silo adds to the sum.

        Raises:
            MasksRefused: saying which rule of the protocol the request breaks.
        """
        if stage not in STAGES:
            raise MasksRefused(f"no such stage: {stage!r:.40}")
        try:
            if stage == "offer":
                return self._offer(), b""
            if stage == "share":
                return {"sealed": self._share(dict(asked["offers"]))}, b""
            if stage == "mask":
                return {}, self._masked(dict(asked["sealed"]), summand)
            if stage == "consent":
                return {"signature": self._consent(list(asked["survivors"]))}, b""
            return self._unmask(list(asked["survivors"]), dict(asked["signatures"])), b""
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MasksRefused(f"{stage}: a malformed request ({type(error).__name__})") from error

    def _offer(self) -> dict[str, str]:
        seal_key, mask_key = public_bytes(self._seal).hex(), public_bytes(self._mask).hex()
        signature = sign(self._identity, self.agreement.text("keys", self.name, seal_key, mask_key))
        return {"seal": seal_key, "mask": mask_key, "signature": signature.hex()}

    def _share(self, offers: dict[str, dict[str, str]]) -> dict[str, str]:
        require_enough("members with keys", list(offers), self.peers)
        for name in offers:
            if name not in self.agreement.members:
                raise MasksRefused(f"keys of silo {name!r:.60}, which is no member of the sum")
        if offers.get(self.name) != self._offer():
            raise MasksRefused("the keys that are shown as this silo's are not its own")
        for name, offer in offers.items():
            text = self.agreement.text("keys", name, offer["seal"], offer["mask"])
            if not self.peers.verify(name, bytes.fromhex(offer["signature"]), text):
                raise MasksRefused(
                    f"the keys of silo {name!r} are not signed by it for this run, round, attempt, configuration, "
                    "broadcast and list of members"
                )
        self._once("offers", offers, "other keys of the members")
        if "sealed" not in self.kept:
            holders = sorted(offers)
            own, mask = (split(seed, self.agreement.threshold, holders) for seed in (self._own_seed, self._mask_seed))
            self.kept["own"] = (own[self.name] + mask[self.name]).hex()
            self.kept["sealed"] = {
                peer: seal(self._key_to(peer, sent=True), own[peer] + mask[peer], self._digest).hex()
                for peer in holders
                if peer != self.name
            }
        return dict(self.kept["sealed"])

    def _key_to(self, peer: str, sent: bool) -> bytes:
        """Return the key of the one message between this silo and a peer in one direction."""
        way = (self.name, peer) if sent else (peer, self.name)
        return pair_key(self._seal, bytes.fromhex(self.kept["offers"][peer]["seal"]), self._digest, "seal", *way)

    def _masked(self, sealed: dict[str, str], summand: Numbers) -> bytes:
        offers = self._before("offers", "mask")
        if len(summand) != self.agreement.numbers:
            raise MasksRefused(f"a sum of {self.agreement.numbers} numbers; this silo has {len(summand)}")
        for peer in sealed:
            if peer not in offers or peer == self.name:
                raise MasksRefused(f"shares of silo {peer!r:.60}, whose keys were not shown")
        require_enough("members with shares", [*sealed, self.name], self.peers)
        shares = {self.name: self.kept["own"]}
        for peer, data in sealed.items():
            opened = unseal(self._key_to(peer, sent=False), bytes.fromhex(data), self._digest)
            if opened is None or len(opened) != 2 * SEED_BYTES:
                raise MasksRefused(f"the shares of silo {peer!r} were not sealed by it for this silo and this sum")
            shares[peer] = opened.hex()
        self._once("shares", shares, "shares of other members")
        self._once("summand", hashlib.sha256(summand.tobytes()).hexdigest(), "another summand")
        masked = summand + self_mask(self._own_seed, self._digest, len(summand))
        for peer in sealed:
            theirs = bytes.fromhex(offers[peer]["mask"])
            masked += pair_mask(self._mask, self.name, theirs, peer, self._digest, len(summand))
        return masked.astype("<u8").tobytes()

    def _consent(self, survivors: list[str]) -> str:
        shares = self._before("shares", "consent")
        self._before("summand", "consent")
        if survivors != sorted({*survivors}) or not {*survivors} <= shares.keys():
            raise MasksRefused("survivors: must be different members with shares, in order")
        if self.name not in survivors:
            raise MasksRefused("survivors: without this silo, which has sent its summand")
        require_enough("survivors", survivors, self.peers)
        self._once("survivors", survivors, "another list of survivors")
        self._ledger(self.agreement, survivors)
        return sign(self._identity, self.agreement.text("survivors", survivors)).hex()

    def _unmask(self, survivors: list[str], signatures: dict[str, str]) -> dict[str, Any]:
        signed = self._before("survivors", "unmask")
        if survivors != signed:
            raise MasksRefused(
                f"asked to unmask for other survivors than this silo has signed ({', '.join(signed)}): of a peer it "
                "tells its share of the seed or that of the key, never both"
            )
        text = self.agreement.text("survivors", survivors)
        for name, signature in signatures.items():
            if name not in survivors or not self.peers.verify(name, bytes.fromhex(signature), text):
                raise MasksRefused(f"silo {name!r:.60} has not signed this list of survivors")
        if len(signatures) < self.agreement.threshold:
            raise MasksRefused(f"{len(signatures)} silos have signed the survivors; t = {self.agreement.threshold}")
        shares = {name: bytes.fromhex(share) for name, share in self.kept["shares"].items()}
        return {
            "seeds": {name: share[:SEED_BYTES].hex() for name, share in shares.items() if name in survivors},
            "keys": {name: share[SEED_BYTES:].hex() for name, share in shares.items() if name not in survivors},
        }

    def _before(self, name: str, stage: str) -> Any:
        """Return what an earlier stage has kept; stages cannot be left out."""
        if name not in self.kept:
            raise MasksRefused(f"{stage}: asked before the stages that come first")
        return self.kept[name]

    def _once(self, name: str, value: object, what: str) -> None:
        """Keep what a stage was asked with; refuse to go through it a second time with something else."""
        plain = json.loads(json.dumps(value))
        if self.kept.setdefault(name, plain) != plain:
            raise MasksRefused(f"asked again in the same attempt with {what}")


def numbers_of(summand: Any) -> Numbers:
    """Return a summand, int64 on the CPU, as the protocol adds it: modulo 2⁶⁴."""
    return np.asarray(summand.numpy()).view(np.uint64)
