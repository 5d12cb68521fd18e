"""The coordinator's side of one sum under masks: it forwards silos' messages, adds, and takes the masks off."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silotune.communication.masks import keys
from silotune.communication.masks.agreement import FIRST, Agreement, Peers, public_identity, rounds_of_keys
from silotune.communication.masks.fixed_point import Sum
from silotune.communication.masks.keys import SEED_BYTES
from silotune.communication.masks.silo import SiloRound, StageAnswer, Texts
from silotune.errors import SilotuneError

Ask = Callable[[str, Mapping[str, Texts]], Mapping[str, StageAnswer]]
"""Stage, and silo → what it is shown → the answers of those that answered, by silo."""


@dataclass
class RoundKeys:
    """What silos told of their keys for all rounds of an agreement; empty before the first of its sums.

    `shares` are silo → peer → the peer's shares for it, sealed; empty texts once it has opened them.
    """

    offers: dict[str, str] = field(default_factory=dict)
    shares: dict[str, Texts] = field(default_factory=dict)


class SumFailed(SilotuneError):
    """Too few silos are left of a sum; nothing of any silo was revealed."""


def masked_sum(
    agreement: Agreement,
    least: int,
    ask: Ask,
    before_consent: Callable[[list[str]], None] = lambda _: None,
    round_keys: RoundKeys | None = None,
) -> Sum:
    """Lead the silos through the five stages, and return the sum; a silo without a well-formed answer drops out.

    Args:
        agreement: what is summed.
        least: the fewest survivors, at least t.
        ask: carries requests to silos.
        before_consent: called with the survivors before any silo is asked to sign them.
        round_keys: the keys of an earlier sum of the same agreement's rounds, or an empty one for them; None: no later
            sum has this one's.

    Raises:
        SumFailed: fewer than that are left in a stage.
    """
    members, threshold = agreement.members, agreement.threshold
    sent, received = dict.fromkeys(members, b""), dict.fromkeys(members, 0)
    rounds, place, round_keys = agreement.rounds, agreement.place, round_keys or RoundKeys()
    # a key has 32 bytes, a signature 64, and a seal adds 16
    offer, share = 32 * (1 + rounds) + 64, 2 * SEED_BYTES * rounds + 16
    sizes = {"offer": offer, "share": share, "mask": 0, "consent": 64, "unmask": SEED_BYTES}

    def stage(
        name: str, requests: Mapping[str, Texts], needed: int, about: Callable[[str], Collection[str]]
    ) -> dict[str, StageAnswer]:
        answers: dict[str, StageAnswer] = {}
        for silo, (texts, data) in sorted(ask(name, requests).items()):
            received[silo] += len(json.dumps(requests[silo]))
            sent[silo] += json.dumps(texts).encode() + data
            right_size = len(data) == (8 * agreement.numbers if name == "mask" else 0)
            if right_size and texts.keys() == {*about(silo)} and _are_of(sizes[name], texts.values()):
                answers[silo] = texts, data
        if len(answers) < needed:
            missing = ", ".join(silo for silo in members if silo not in answers)
            raise SumFailed(
                f"{name}: {len(answers)} of {len(members)} silos answered, {needed} must; missing: {missing}"
            )
        return answers

    if not round_keys.shares:
        nothing: Texts = {}
        offered = stage("offer", dict.fromkeys(members, nothing), least, lambda silo: [silo])
        round_keys.offers = {silo: texts[silo] for silo, (texts, _) in offered.items()}
        all_offers = dict.fromkeys(round_keys.offers, round_keys.offers)
        sealed = stage("share", all_offers, least, lambda silo: round_keys.offers.keys() - {silo})
        round_keys.shares = {silo: {peer: sealed[peer][0][silo] for peer in sealed if peer != silo} for silo in sealed}
    shares, offers = (
        round_keys.shares,
        {silo: keys.parts_of_offer(offer)[0] for silo, offer in round_keys.offers.items()},
    )
    masked = stage("mask", shares, least, lambda _: [])
    round_keys.shares = {silo: dict.fromkeys(of_peers, "") for silo, of_peers in shares.items()}
    survivors = list(masked)
    before_consent(survivors)
    unsigned = dict.fromkeys(survivors, "")
    signed = stage("consent", dict.fromkeys(survivors, unsigned), threshold, lambda silo: [silo])
    signatures = unsigned | {silo: texts[silo] for silo, (texts, _) in signed.items()}
    unmasked = stage("unmask", dict.fromkeys(signed, signatures), threshold, lambda _: shares)
    total = np.zeros(agreement.numbers, np.uint64)
    for _, data in masked.values():
        total += np.frombuffer(data, dtype="<u8")
    helpers, digest, count = [*unmasked][:threshold], agreement.digest, agreement.numbers
    for silo in shares:
        seed = keys.combine({helper: bytes.fromhex(unmasked[helper][0][silo]) for helper in helpers}, sorted(offers))
        if silo in masked:
            total -= keys.self_mask(seed, digest, count)
            continue
        key = keys.exchange_key(seed, agreement.keys.digest, "mask")
        if keys.public_bytes(key) != offers[silo][1 + place]:
            raise SilotuneError(f"sum under masks: the shares of the key of silo {silo!r} are not of its key")
        for peer in survivors:
            total += keys.pair_mask(key, silo, offers[peer][1 + place], peer, digest, count)
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


class SumsInProcess:
    """Simulates the sums of silos of this process by the messages that they would send; identities are made for them.

    Keys are made for several rounds together, as between machines, so that silos send as many bytes.

    Args:
        silos: all silos of the run.
        rounds: of the run.
        least: the fewest silos of a sum; None: more than two thirds of them.
    """

    def __init__(self, silos: Iterable[str], rounds: int, least: int | None = None) -> None:
        self._identities, self._peers = made_identities(silos, least)
        self._rounds = rounds
        self._series: Agreement | None = None

    def sum(self, number: int, summands: Mapping[str, Tensor]) -> Sum:
        """Return the sum of a round's summands, silo → int64; silos without one have dropped out."""
        members, length = sorted(summands), len(next(iter(summands.values())))
        if self._series is None or not self._series.has_keys(number, members):
            listed = members, self._peers.fingerprint, self._peers.threshold
            rounds = rounds_of_keys(number, self._rounds)
            self._series = Agreement("", number, "", "", "", FIRST, 0, *listed, first=number, rounds=rounds)
            self._keys, self._notes = RoundKeys(), {name: dict[str, Any]() for name in members}
        agreement = replace(self._series, round=number, numbers=length)
        here = {
            name: SiloRound(
                name, self._identities[name], self._peers, agreement, summands[name], lambda *_: None, self._notes[name]
            )
            for name in members
        }

        def ask(stage: str, requests: Mapping[str, Texts]) -> dict[str, StageAnswer]:
            return {name: here[name].answer(stage, texts) for name, texts in requests.items()}

        return masked_sum(agreement, self._peers.fewest, ask, round_keys=self._keys)
