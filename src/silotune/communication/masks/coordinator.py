"""The coordinator's side of one sum under masks: it forwards silos' messages, adds, and takes the masks off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from silotune.communication.masks.agreement import Agreement
from silotune.communication.masks.keys import Numbers, combine, exchange_key, pair_mask, public_bytes, self_mask
from silotune.communication.masks.silo import Answer
from silotune.errors import SilotuneError

Read = TypeVar("Read")

Requests = Mapping[str, dict[str, Any]]

Ask = Callable[[str, Requests], Mapping[str, Answer]]
"""Stage, and silo → its request → the answers of those that answered, by silo."""

Texts = dict[str, str]


class SumFailed(SilotuneError):
    """Too few silos are left of a sum; nothing of any silo was revealed."""


@dataclass(frozen=True)
class Sum:
    """The sum of the survivors' summands, int64, and their names in order."""

    total: Tensor
    survivors: list[str]


@dataclass(frozen=True)
class _Told:
    """A silo's shares, by whose: of survivors' seeds, and of the keys of silos that dropped out behind their shares."""

    seeds: Texts
    keys: Texts


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

    def stage(
        name: str, requests: Requests, needed: int, read: Callable[[str, Answer], Read | None]
    ) -> dict[str, Read]:
        answers = ask(name, requests)
        found = {silo: read(silo, answers[silo]) for silo in sorted(requests) if silo in answers}
        left = {silo: value for silo, value in found.items() if value is not None}
        if len(left) < needed:
            missing = ", ".join(silo for silo in agreement.members if silo not in left)
            raise SumFailed(
                f"{name}: {len(left)} of {len(agreement.members)} silos answered, {needed} must; missing: {missing}"
            )
        return left

    offers = stage(
        "offer",
        {silo: {} for silo in agreement.members},
        least,
        lambda _, a: _texts(a[0], ("seal", "mask", "signature")),
    )
    sealed = stage(
        "share", {silo: {"offers": offers} for silo in offers}, least,
        lambda silo, a: _texts(a[0].get("sealed"), offers.keys() - {silo}),
    )  # fmt: skip
    masked = stage(
        "mask",
        {silo: {"sealed": {peer: sealed[peer][silo] for peer in sealed if peer != silo}} for silo in sealed},
        least,
        lambda _, a: a[1] if len(a[1]) == 8 * agreement.numbers else None,
    )
    survivors, dropped = sorted(masked), sorted(sealed.keys() - masked.keys())
    before_consent(survivors)
    signatures = stage(
        "consent", {silo: {"survivors": survivors} for silo in survivors}, agreement.threshold,
        lambda _, a: _texts({"signature": a[0].get("signature")}, ("signature",)),
    )  # fmt: skip
    request = {"survivors": survivors, "signatures": {silo: told["signature"] for silo, told in signatures.items()}}
    told = stage(
        "unmask", dict.fromkeys(signatures, request), agreement.threshold,
        lambda _, a: _told(a[0], survivors, dropped),
    )  # fmt: skip
    total = np.zeros(agreement.numbers, np.uint64)
    for data in masked.values():
        total += np.frombuffer(data, dtype="<u8")
    total -= _masks_left(agreement, offers, told, survivors, dropped)
    return Sum(torch.from_numpy(total.view(np.int64)), survivors)


def _texts(value: object, names: Collection[str]) -> Texts | None:
    """Return a mapping of these names to hexadecimal texts; None if it is none."""
    if not isinstance(value, dict) or value.keys() != {*names}:
        return None
    try:
        return {name: bytes.fromhex(text).hex() for name, text in value.items()}
    except (TypeError, ValueError):
        return None


def _told(fields: Mapping[str, Any], survivors: list[str], dropped: list[str]) -> _Told | None:
    seeds, keys = _texts(fields.get("seeds"), survivors), _texts(fields.get("keys"), dropped)
    if seeds is None or keys is None or any(len(share) != 32 for share in (*seeds.values(), *keys.values())):
        return None
    return _Told(seeds, keys)


def _masks_left(
    agreement: Agreement,
    offers: Mapping[str, Texts],
    told: Mapping[str, _Told],
    survivors: list[str],
    dropped: list[str],
) -> Numbers:
    """Return the masks that do not cancel in the survivors' sum: their own ones, and those for silos that dropped."""
    digest, count, holders = agreement.digest, agreement.numbers, sorted(offers)
    helpers = sorted(told)[: agreement.threshold]
    masks = np.zeros(count, np.uint64)
    for silo in survivors:
        shares = {helper: bytes.fromhex(told[helper].seeds[silo]) for helper in helpers}
        masks += self_mask(combine(shares, holders), digest, count)
    for silo in dropped:
        shares = {helper: bytes.fromhex(told[helper].keys[silo]) for helper in helpers}
        key = exchange_key(combine(shares, holders), digest, "mask")
        if public_bytes(key).hex() != offers[silo]["mask"]:
            raise SilotuneError(f"sum under masks: the shares of the key of silo {silo!r} are not of its key")
        for peer in survivors:
            masks -= pair_mask(key, silo, bytes.fromhex(offers[peer]["mask"]), peer, digest, count)
    return masks
