"""Silos in a sum under masks, driven by hand."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from silotune.communication.masks.agreement import FIRST, Agreement, Peers, base_after, public_identity
from silotune.communication.masks.coordinator import made_identities, masked_sum
from silotune.communication.masks.fixed_point import Sum, summand
from silotune.communication.masks.silo import STAGES, SiloRound
from silotune.core.records import Records
from silotune.distributed.silo import mask_ledger
from silotune.distributed.silo.silo_config import MaskedConfig, SiloSettings
from tests.support.session_rig import local_configs

NOBODY: Mapping[str, Collection[str]] = {}
NOTHING_MORE: Mapping[str, int] = {}


def names_of(count: int) -> list[str]:
    return [f"s{number:02d}" for number in range(count)]


def agreement_of(peers: Peers, numbers: int, **changes) -> Agreement:
    base = Agreement(
        "0" * 16, 1, "a", "config", "broadcast", FIRST, numbers, sorted(peers.keys), peers.fingerprint, peers.threshold
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
    agreement = agreement_of(peers, 6)
    silos = {
        name: SiloRound(name, identities[name], peers, agreement, summands[name], lambda *_: None) for name in names
    }

    def ask(stage, shown):
        gone = {name for each in STAGES[: STAGES.index(stage) + 1] for name in drops.get(each, ())}
        return {name: silos[name].answer(stage, texts) for name, texts in shown.items() if name not in gone}

    found = masked_sum(agreement, peers.fewest, ask)
    return found, sum(summands[name] for name in found.survivors)


def secure_silos(config, out, masked: Mapping[str, int] = NOTHING_MORE, **more) -> dict[str, SiloSettings]:
    """Return the silos' settings, with identities and the list of them; `masked` has more keys of that section."""
    found = local_configs(config, out, **more)
    files = {name: out.with_name(f"{out.name}-{name}.key") for name in found}
    for file in files.values():
        if not file.exists():
            file.write_bytes(secrets.token_bytes(32))
    keys = {name: public_identity(file.read_bytes()).hex() for name, file in files.items()}
    return {
        name: each.model_copy(update={"masked": MaskedConfig(identity=str(files[name]), peers=keys, **masked)})
        for name, each in found.items()
    }


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
        self.summands = summands_of(self.names)
        self.records = {name: Records(folder / name, mask_ledger.TABLES) for name in self.names}
        self.silos: dict[str, SiloRound] = {}
        self.offers: dict[str, str] = {}

    def begin(self, name: str, **changes) -> SiloRound:
        """Propose the agreement to a silo, with some changes; without `base` among them it is that of an honest run."""
        records, agreement = self.records[name], replace(self.agreement, **changes)
        if "base" not in changes:
            query = "SELECT after FROM mask_sums WHERE run = ? AND round < ? ORDER BY round DESC LIMIT 1"
            for (last,) in records.rows(query, agreement.run, agreement.round):
                agreement = replace(agreement, base=last)
        after = base_after(agreement.base, agreement.round, agreement.configuration, agreement.broadcast)
        summand = hashlib.sha256(self.summands[name].numpy().tobytes()).hexdigest()
        mask_ledger.begin(records, agreement, after, summand)
        return self.made(name, agreement)

    def made(self, name: str, agreement: Agreement, *kept) -> SiloRound:
        """Let a silo begin an attempt, without a look into its ledger."""
        sign = partial(mask_ledger.sign, self.records[name])
        silo = SiloRound(name, self.identities[name], self.peers, agreement, self.summands[name], sign, *kept)
        self.silos[name] = silo
        return silo

    def ask(self, name: str, stage: str, shown):
        return self.silos[name].answer(stage, shown)[0]

    def until(self, stage: str, **changes) -> None:
        """Lead all members honestly up to a stage, which is left out."""
        members = changes.get("members", self.agreement.members)
        steps = STAGES[: STAGES.index(stage)]
        for name in members:
            self.begin(name, **changes)
        if "offer" in steps:
            self.offers = {name: self.ask(name, "offer", {})[name] for name in members}
        if "share" in steps:
            sealed = {name: self.ask(name, "share", self.offers) for name in members}
            self.sealed = {name: {peer: sealed[peer][name] for peer in members if peer != name} for name in members}
        if "mask" in steps:
            for name in members:
                self.ask(name, "mask", self.sealed[name])
        if "consent" in steps:
            self.signatures = {name: self.ask(name, "consent", unsigned(members))[name] for name in members}


def unsigned(survivors) -> dict[str, str]:
    """Return what is shown to a silo that is asked to sign survivors."""
    return dict.fromkeys(survivors, "")
