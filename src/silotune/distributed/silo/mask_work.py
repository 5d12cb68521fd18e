"""A silo's answers in sums under masks, over machines: what it trained, its identity and its ledger behind each."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from silotune.communication.masks.agreement import Agreement, MasksRefused, Peers, public_identity
from silotune.communication.masks.fixed_point import SUMMAND, read_summand
from silotune.communication.masks.silo import SiloRound
from silotune.core.serialization import tensor_bytes
from silotune.distributed.protocol.frames import MASKED, Frame, require_fields, state_name
from silotune.distributed.silo import mask_ledger
from silotune.distributed.silo.secret import write_secret
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.store import Answer, SiloStore
from silotune.errors import InputError


def made_identity(path: Path) -> str:
    """Return the public key of the identity in a file, which is made if it is not there."""
    if not path.exists():
        write_secret(path)
    return public_identity(path.read_bytes()).hex()


def read_masked(settings: SiloSettings) -> tuple[bytes, Peers]:
    """Return a silo's private identity key and its pinned list, in which its own key must be listed."""
    masked = settings.masked
    assert masked is not None, "a silo config without it is refused before"
    try:
        identity = Path(masked.identity).read_bytes()
        public = public_identity(identity).hex()
    except (OSError, ValueError) as error:
        raise InputError("masked.identity: its file cannot be read, or is no key of 32 bytes") from error
    if masked.peers[settings.name] != public:
        raise InputError(f"masked.peers: {settings.name} is listed with another key than its own, {public}")
    return identity, Peers({name: bytes.fromhex(key) for name, key in masked.peers.items()}, masked.least)


def masks_line(settings: SiloSettings) -> str:
    """Describe the pinned list to the operator, with the fingerprint to compare and what it withstands."""
    _, peers = read_masked(settings)
    return (
        f"fingerprint {peers.fingerprint} of {len(peers.keys)} silos; sums of at least {peers.fewest} of them, whose "
        f"parts stay hidden if up to {peers.colluders} of the others help a lying coordinator"
    )


def pinned_list(settings: SiloSettings) -> tuple[str, int, int]:
    """Return what the coordinator learns of the pinned list; see `Hello`."""
    _, peers = read_masked(settings)
    return peers.fingerprint, len(peers.keys), peers.fewest


def answer_masks(settings: SiloSettings, store: SiloStore, request: Frame) -> Answer:
    """Answer one stage of a sum under masks; whatever later stages depend on is stored before it leaves."""
    run, number, stage, proposal, shown = require_fields(request.fields, "run", "round", "stage", "agreement", "shown")
    try:
        attempt, members = str(proposal["attempt"]), sorted({*proposal["members"]})
        trained = store.answer_of(run, state_name(int(number)))
    except (KeyError, TypeError, ValueError) as error:
        raise MasksRefused(f"a malformed proposal of a sum ({type(error).__name__})") from error
    if trained is None or SUMMAND not in trained[1].frame.blobs:
        raise MasksRefused(f"no summand of round {number!r:.20} of this run is kept here")
    asked, answer = trained
    summand, (identity, peers) = read_summand(answer.frame.blobs[SUMMAND]), read_masked(settings)
    config, tensors, numbers = asked["config"], answer.about["tensors"], len(summand)
    agreement = Agreement(
        str(run), int(number), attempt, config, tensors, numbers, members, peers.fingerprint, peers.threshold
    )
    agreement.require_same(proposal)
    mask_ledger.require_stayed(store.records, agreement)
    kept, sign = mask_ledger.kept(store.records, agreement), partial(mask_ledger.sign, store.records)
    silo = SiloRound(settings.name, identity, peers, agreement, summand, sign, kept)
    told, data = silo.answer(str(stage), shown)
    mask_ledger.keep(store.records, agreement, silo.kept)
    blobs = {MASKED: tensor_bytes({MASKED: torch.frombuffer(bytearray(data), dtype=torch.int64)})} if data else {}
    fields = {"silo": settings.name, "round": int(number), "told": told}
    return Answer(Frame("masks", fields, blobs), {"stage": stage, "shown": sorted(shown)})
