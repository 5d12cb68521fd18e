"""The silos of one process in a sum under masks: the simulation's, with the same messages as over machines."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from silotune.communication.masks.agreement import Agreement, Peers, public_identity
from silotune.communication.masks.coordinator import Requests, Sum, masked_sum
from silotune.communication.masks.silo import Answer, SiloRound, numbers_of


def made_identities(names: Iterable[str]) -> tuple[dict[str, bytes], Peers]:
    """Return new identities of silos, and the list of them."""
    identities = {name: secrets.token_bytes(32) for name in names}
    return identities, Peers({name: public_identity(key) for name, key in identities.items()})


class LocalSilos:
    """Answers a coordinator's requests for silos of this process, and keeps what they send.

    Args:
        agreement: of the sum.
        summands: silo → its summand.
        identities: silo → its private key.
        peers: the list of all.
    """

    def __init__(
        self, agreement: Agreement, summands: Mapping[str, Tensor], identities: Mapping[str, bytes], peers: Peers
    ) -> None:
        self.rounds = {
            name: SiloRound(name, identities[name], peers, agreement, lambda *_: None) for name in agreement.members
        }
        self._summands = {name: numbers_of(summand) for name, summand in summands.items()}
        self.received = dict.fromkeys(agreement.members, 0)
        """Silo → the bytes of other silos that it was sent."""
        self.sent = dict.fromkeys(agreement.members, b"")
        """Silo → all bytes that it has sent."""

    def __call__(self, stage: str, requests: Requests) -> dict[str, Answer]:
        """Return every silo's answer; see `coordinator.Ask`."""
        answers = {}
        for name, request in requests.items():
            fields, data = answers[name] = self.rounds[name].answer(stage, request, self._summands[name])
            self.received[name] += len(_written(request))
            self.sent[name] += _written(fields) + data
        return answers


def _written(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def sum_in_process(
    silos: Iterable[str], summands: Mapping[str, Tensor], number: int, config: str, broadcast: bytes
) -> tuple[Sum, LocalSilos]:
    """Return the sum of silos of this process, and what they sent for it; their identities are made for it.

    Args:
        silos: all silos of the run.
        summands: silo → its summand; some may be missing.
        number: the round.
        config: the run's configuration.
        broadcast: the message that opened the round.
    """
    identities, peers = made_identities(silos)
    same, opened = (hashlib.sha256(data).hexdigest() for data in (config.encode(), broadcast))
    members, length = tuple(sorted(summands)), len(next(iter(summands.values()), ()))
    agreement = Agreement("", number, "", same, opened, opened, length, members, peers.fingerprint, peers.threshold)
    here = LocalSilos(agreement, summands, identities, peers)
    return masked_sum(agreement, peers.fewest, here), here
