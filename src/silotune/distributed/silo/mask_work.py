"""A silo's answers in sums under masks, over machines: what it trained, its identity and its ledger behind each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from silotune.communication.masks.agreement import Agreement, MasksRefused, Peers, public_identity
from silotune.communication.masks.fixed_point import read_summand
from silotune.communication.masks.silo import SiloRound, numbers_of
from silotune.communication.messages import message_numbers
from silotune.core.serialization import tensor_bytes
from silotune.distributed.protocol.frames import MASKED, Frame, require_fields, state_name
from silotune.distributed.silo.setup import Prepared
from silotune.distributed.silo.silo_config import MaskedConfig, SiloSettings
from silotune.distributed.silo.store import Answer, SiloStore
from silotune.errors import InputError

SUMMAND = "summand"
"""The blob of a kept answer that never leaves as it is."""


def read_identity(settings: SiloSettings) -> bytes:
    """Return a silo's private identity key, and compare it with the list of peers."""
    masked = _masked(settings)
    try:
        identity = Path(masked.identity).read_bytes()
        public = public_identity(identity).hex()
    except (OSError, ValueError) as error:
        raise InputError("masked.identity: its file cannot be read, or is no key of 32 bytes") from error
    if masked.peers[settings.name] != public:
        raise InputError(f"masked.peers: {settings.name} is listed with another key than its own, {public}")
    return identity


def peers_of(settings: SiloSettings) -> Peers:
    """Return a silo's pinned list."""
    masked = _masked(settings)
    return Peers({name: bytes.fromhex(key) for name, key in masked.peers.items()}, masked.least)


def _masked(settings: SiloSettings) -> MaskedConfig:
    if settings.masked is None:
        raise InputError("masked: the silo config names no silos to sum with")
    return settings.masked


def masks_line(settings: SiloSettings) -> str:
    """Describe the pinned list to the operator, with the fingerprint to compare and what it withstands."""
    read_identity(settings)
    peers = peers_of(settings)
    return (
        f"fingerprint {peers.fingerprint} of {len(peers.keys)} silos; sums of at least {peers.fewest} of them, whose "
        f"parts stay hidden if up to {peers.colluders} of the others help a lying coordinator"
    )


def hello_fields(settings: SiloSettings) -> dict[str, Any]:
    """Return what the coordinator learns of the pinned list."""
    read_identity(settings)
    peers = peers_of(settings)
    return {"peers": peers.fingerprint, "silos": len(peers.keys), "least": peers.fewest}


def answer_masks(settings: SiloSettings, store: SiloStore, prepared: Prepared, request: Frame) -> Answer:
    """Answer one stage of a sum under masks; whatever later stages depend on is stored before it leaves.

    Args:
        settings: the operator's.
        store: of the silo.
        prepared: the run's configuration as this silo carries it out.
        request: of kind `masks`.
    """
    run, number, stage, proposal, asked = require_fields(request.fields, "run", "round", "stage", "agreement", "asked")
    try:
        proposed = Agreement.read(proposal)
        trained = store.answer_of(run, state_name(int(number)))
    except (KeyError, TypeError, ValueError) as error:
        raise MasksRefused(f"a malformed proposal of a sum ({type(error).__name__})") from error
    if not prepared.config.aggregation.secure or trained is None or SUMMAND not in trained[1].frame.blobs:
        raise MasksRefused(f"no summand of round {number!r:.20} of this run is kept here")
    of_request, answer = trained
    message, peers = answer.frame.blobs[SUMMAND], peers_of(settings)
    numbers = message_numbers(message)
    own = Agreement(
        str(run),
        int(number),
        proposed.attempt,
        of_request["config"],
        of_request["broadcast"],
        str(answer.about["tensors"]),
        numbers,
        proposed.members,
        peers.fingerprint,
        peers.threshold,
    )
    proposed.require_own(own)
    store.masks.require_stayed(own)
    kept = store.masks.kept(own)
    silo = SiloRound(settings.name, read_identity(settings), peers, own, store.masks.sign, kept)
    fields, data = silo.answer(str(stage), asked, numbers_of(read_summand(message, numbers)))
    store.masks.keep(own, silo.kept)
    about = {"stage": stage, "survivors": asked["survivors"]} if stage == "consent" else {"stage": stage}
    blobs = {MASKED: tensor_bytes({MASKED: torch.frombuffer(bytearray(data), dtype=torch.int64)})} if data else {}
    told = {"silo": settings.name, "round": int(number), "stage": stage, "attempt": own.attempt, "told": fields}
    return Answer(Frame("masks", told, blobs), about)
