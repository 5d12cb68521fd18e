"""The coordinator's side of one sum under masks: it forwards silos' messages, adds, and takes the masks off."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from silotune.communication.masks import keys
from silotune.communication.masks.agreement import FIRST, Agreement, Peers, public_identity
from silotune.communication.masks.fixed_point import Sum
from silotune.communication.masks.keys import SEED_BYTES
from silotune.communication.masks.silo import Answer, SiloRound, Texts
from silotune.errors import SilotuneError

Ask = Callable[[str, Mapping[str, Texts]], Mapping[str, Answer]]
"""Stage, and silo → what it is shown → the answers of those that answered, by silo."""

_TOLD_BYTES = {"offer": 2 * 32 + 64, "share": 2 * SEED_BYTES + 16, "mask": 0, "consent": 64, "unmask": SEED_BYTES}
"""Stage → bytes of each text that a silo tells: a key has 32, a signature 64, and a seal adds 16."""


class SumFailed(SilotuneError):
    """Too few silos are left of a sum; nothing of any silo was revealed."""


def masked_sum(
    agreement: Agreement, least: int, ask: Ask, before_consent: Callable[[list[str]], None] = lambda _: None
) -> Sum:
    """Lead the silos through the five stages, and return the sum; a silo without a well-formed answer drops out.

    Args:
        agreement: what is summed.
        least: the fewest survivors, at least t.
        ask: carries requests to silos.
        before_consent: called with the survivors before any silo is asked to sign them.

    Raises:
        SumFailed: fewer than that are left in a stage.
    """
    members, threshold = agreement.members, agreement.threshold
    sent, received = dict.fromkeys(members, b""), dict.fromkeys(members, 0)

    def stage(
        name: str, shown: Mapping[str, Texts], needed: int, about: Callable[[str], Collection[str]]
    ) -> dict[str, Answer]:
        left: dict[str, Answer] = {}
        for silo, (told, data) in sorted(ask(name, shown).items()):
            received[silo] += len(json.dumps(shown[silo]))
            sent[silo] += json.dumps(told).encode() + data
            right_size = len(data) == (8 * agreement.numbers if name == "mask" else 0)
            if right_size and told.keys() == {*about(silo)} and _are_of(_TOLD_BYTES[name], told.values()):
                left[silo] = told, data
        if len(left) < needed:
            missing = ", ".join(silo for silo in members if silo not in left)
            raise SumFailed(f"{name}: {len(left)} of {len(members)} silos answered, {needed} must; missing: {missing}")
        return left

    nothing: Texts = {}
    offered = stage("offer", dict.fromkeys(members, nothing), least, lambda silo: [silo])
    offers = {silo: told[silo] for silo, (told, _) in offered.items()}
    sealed = stage("share", dict.fromkeys(offers, offers), least, lambda silo: offers.keys() - {silo})
    shares = {silo: {peer: sealed[peer][0][silo] for peer in sealed if peer != silo} for silo in sealed}
    masked = stage("mask", shares, least, lambda _: [])
    survivors = list(masked)
    before_consent(survivors)
    unsigned = dict.fromkeys(survivors, "")
    signed = stage("consent", dict.fromkeys(survivors, unsigned), threshold, lambda silo: [silo])
    signatures = unsigned | {silo: told[silo] for silo, (told, _) in signed.items()}
    unmasked = stage("unmask", dict.fromkeys(signed, signatures), threshold, lambda _: sealed)
    total = np.zeros(agreement.numbers, np.uint64)
    for _, data in masked.values():
        total += np.frombuffer(data, dtype="<u8")
    helpers, digest, count = [*unmasked][:threshold], agreement.digest, agreement.numbers
    for silo in sealed:
        seed = keys.combine({helper: bytes.fromhex(unmasked[helper][0][silo]) for helper in helpers}, sorted(offers))
        if silo in masked:
            total -= keys.self_mask(seed, digest, count)
            continue
        key = keys.exchange_key(seed, digest, "mask")
        if keys.public_bytes(key) != keys.parts_of_offer(offers[silo])[1]:
            raise SilotuneError(f"sum under masks: the shares of the key of silo {silo!r} are not of its key")
        for peer in survivors:
            total += keys.pair_mask(key, silo, keys.parts_of_offer(offers[peer])[1], peer, digest, count)
    return Sum(torch.from_numpy(total.view(np.int64)), survivors, sent, received)


def _are_of(size: int, texts: Iterable[str]) -> bool:
    """Return whether all texts are hexadecimal digits of so many bytes."""
    try:
        return all(len(bytes.fromhex(text)) == size for text in texts)
    except (TypeError, ValueError):
        return False


def made_identities(names: Iterable[str], least: int | None = None) -> tuple[dict[str, bytes], Peers]:
    """Return new identities of silos, and the list of them."""
    identities = {name: secrets.token_bytes(32) for name in names}
    return identities, Peers({name: public_identity(key) for name, key in identities.items()}, least)


def sum_in_process(silos: Iterable[str], summands: Mapping[str, Tensor], least: int | None = None) -> Sum:
    """Simulate a sum of silos of this process by the messages that they would send; identities are made for it.

    Args:
        silos: all silos of the run.
        summands: silo → its summand; some may be missing.
        least: the fewest silos of a sum; None: more than two thirds of them.
    """
    identities, peers = made_identities(silos, least)
    length, members = len(next(iter(summands.values()))), sorted(summands)
    agreement = Agreement("", 0, "", "", "", FIRST, length, members, peers.fingerprint, peers.threshold)
    here = {
        name: SiloRound(name, identities[name], peers, agreement, summands[name], lambda *_: None) for name in members
    }

    def ask(stage: str, shown: Mapping[str, Texts]) -> dict[str, Answer]:
        return {name: here[name].answer(stage, texts) for name, texts in shown.items()}

    return masked_sum(agreement, peers.fewest, ask)
