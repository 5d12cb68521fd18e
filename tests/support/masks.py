"""Silos in a sum under masks, driven by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from silotune.communication.masks.agreement import Agreement, Peers
from silotune.communication.masks.coordinator import Sum, masked_sum
from silotune.communication.masks.fixed_point import summand
from silotune.communication.masks.in_process import LocalSilos, made_identities
from silotune.communication.masks.silo import STAGES, SiloRound, numbers_of
from silotune.core.records import Records
from silotune.distributed.silo import mask_ledger
from silotune.distributed.silo.mask_ledger import MaskLedger

NOBODY: Mapping[str, Collection[str]] = {}


def names_of(count: int) -> list[str]:
    return [f"s{number:02d}" for number in range(count)]


def agreement_of(peers: Peers, numbers: int, **changes) -> Agreement:
    members = tuple(sorted(peers.keys))
    base = Agreement(
        "0" * 16, 1, "a", "config", "broadcast", "tensors", numbers, members, peers.fingerprint, peers.threshold
    )
    return replace(base, **changes)


def summands_of(names: list[str], size: int = 5, weight: int = 200_000, value: float | None = None):
    """Return a summand of each silo, of random changes or of one value."""
    changes = {
        name: torch.randn(size, dtype=torch.float64) if value is None else torch.full((size,), value) for name in names
    }
    return {name: summand([("part/x", change)], weight, 0, name, 1) for name, change in changes.items()}


def summed(
    count: int, drops: Mapping[str, Collection[str]] = NOBODY, value: float | None = None
) -> tuple[Sum, torch.Tensor]:
    """Return the sum under masks of so many silos, and the plain sum of the survivors' summands.

    Args:
        count: the number of silos.
        drops: stage → silos that are gone from it on.
        value: of all numbers of all changes; None: random ones.
    """
    names = names_of(count)
    identities, peers = made_identities(names)
    summands = summands_of(names, value=value)
    silos = LocalSilos(agreement_of(peers, 6), summands, identities, peers)

    def ask(stage, requests):
        gone = {name for each in STAGES[: STAGES.index(stage) + 1] for name in drops.get(each, ())}
        return silos(stage, {name: request for name, request in requests.items() if name not in gone})

    found = masked_sum(silos.rounds[names[0]].agreement, peers.fewest, ask)
    return found, sum(summands[name] for name in found.survivors)


class ByHand:
    """Silos that answer whatever they are asked, each with a ledger of its own.

    Args:
        folder: for the ledgers.
        count: the number of pinned silos.
    """

    def __init__(self, folder: Path, count: int = 4, **changes) -> None:
        self.names = names_of(count)
        self.identities, self.peers = made_identities(self.names)
        self.agreement = agreement_of(self.peers, 6, **changes)
        self.summands = {name: numbers_of(each) for name, each in summands_of(self.names).items()}
        self.ledgers = {name: MaskLedger(Records(folder / name, mask_ledger.TABLES)) for name in self.names}
        self.silos: dict[str, SiloRound] = {}
        self.offers: dict[str, dict[str, str]] = {}

    def begin(self, name: str, **changes) -> SiloRound:
        """Propose the agreement to a silo, with some changes."""
        agreement = replace(self.agreement, **changes)
        self.ledgers[name].require_stayed(agreement)
        sign = self.ledgers[name].sign
        self.silos[name] = SiloRound(name, self.identities[name], self.peers, agreement, sign)
        return self.silos[name]

    def ask(self, name: str, stage: str, **asked):
        """Return the plain values of a silo's answer."""
        return self.silos[name].answer(stage, asked, self.summands[name])[0]

    def until(self, stage: str, **changes) -> None:
        """Lead all members honestly up to a stage, which is left out."""
        members = changes.get("members", self.agreement.members)
        steps = STAGES[: STAGES.index(stage)]
        for name in members:
            self.begin(name, **changes)
        if "offer" in steps:
            self.offers = {name: self.ask(name, "offer") for name in members}
        if "share" in steps:
            sealed = {name: self.ask(name, "share", offers=self.offers)["sealed"] for name in members}
            self.sealed = {name: {peer: sealed[peer][name] for peer in members if peer != name} for name in members}
        if "mask" in steps:
            for name in members:
                self.ask(name, "mask", sealed=self.sealed[name])
        if "consent" in steps:
            self.signatures = {
                name: self.ask(name, "consent", survivors=list(members))["signature"] for name in members
            }
