"""A silo's answers in sums under masks, over machines: what it trained, its identity and its ledger behind each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from silotune.communication.masks.agreement import FIRST, Agreement, MasksRefused, Peers, base_after, public_identity
from silotune.communication.masks.fixed_point import SUMMAND, read_summand
from silotune.communication.masks.silo import STAGES, SiloRound
from silotune.communication.privacy.accountant import assumption
from silotune.core.serialization import tensor_bytes
from silotune.distributed.protocol.frames import MASKED, Frame, require_fields, state_name
from silotune.distributed.silo import mask_ledger
from silotune.distributed.silo.secret import write_secret
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.store import SiloAnswer, SiloStore
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
    return identity, Peers(
        {name: bytes.fromhex(key) for name, key in masked.peers.items()}, masked.least, masked.assumed
    )


def masks_line(settings: SiloSettings) -> str:
    """Describe the pinned list to the operator, with the fingerprint to compare and what it withstands."""
    _, peers = read_masked(settings)
    return (
        f"fingerprint {peers.fingerprint} of {len(peers.keys)} silos; sums of at least {peers.fewest} of them, whose "
        f"parts stay hidden if up to {peers.colluders} of the others help a lying coordinator; ε of shared noise holds "
        f"{assumption(peers.assumed)}"
    )


def pinned_list(settings: SiloSettings) -> tuple[str, int, int]:
    """Return what the coordinator learns of the pinned list; see `Hello`."""
    _, peers = read_masked(settings)
    return peers.fingerprint, len(peers.keys), peers.fewest


def base_of(store: SiloStore, run: str, state: str) -> str:
    """Return the `base` of an agreement for a silo that starts from this state of its own; see `base_after`."""
    if not state:
        return FIRST
    record = store.answer_of(run, state)
    if record is None or "base" not in record[1].about:
        raise MasksRefused(f"state {state!r:.40} was not trained in a round of sums under masks")
    return _base_after(*record)


def _base_after(request_key: Mapping[str, str], answer: SiloAnswer) -> str:
    """Return the next round's `base`, from a round's request and answer."""
    about = answer.about
    return base_after(about["base"], answer.frame.fields["round"], request_key["recipe"], about["tensors"])


def require_next(store: SiloStore, run: str, number: int, base: str, recipe: str, tensors: str) -> None:
    """Refuse to train a round of sums under masks from another state, or anew; see `mask_ledger.require_next`."""
    mask_ledger.require_next(store.records, run, number, base, base_after(base, number, recipe, tensors))


def erase_secrets(store: SiloStore, run: str) -> None:
    """Erase a run's seeds, shares and summands; a round that is asked for again is trained to the same summand."""
    with store.records.transaction():
        mask_ledger.erase(store.records, run)
        store.erase_blob(run, SUMMAND)


def answer_masks(settings: SiloSettings, store: SiloStore, request: Frame, config: str, noise: str) -> SiloAnswer:
    """Answer one stage of a sum under masks; whatever later stages depend on is stored before it leaves.

    `config` and `noise` are those of the agreement of keys for rounds that are not trained yet.
    """
    run, number, stage, proposal, texts = require_fields(request.fields, "run", "round", "stage", "agreement", "shown")
    try:
        attempt, members = str(proposal["attempt"]), sorted({*proposal["members"]})
        together = int(proposal["first"]), int(proposal["rounds"])
        trained = store.answer_of(run, state_name(int(number)))
    except (KeyError, TypeError, ValueError) as error:
        raise MasksRefused(f"a malformed proposal of a sum ({type(error).__name__})") from error
    identity, peers = read_masked(settings)
    listed = members, peers.fingerprint, peers.threshold
    summand, after, own = torch.empty(0, dtype=torch.int64), "", ""
    if stage in STAGES[:2]:  # of the rounds from this one on, none of which may be trained yet
        values = str(run), int(number), attempt, config, "", "", 0
        agreement = Agreement(*values, *listed, noise, *together)
    elif trained is None or SUMMAND not in trained[1].frame.blobs:
        raise MasksRefused(f"no summand of round {number!r:.20} of this run is kept here")
    else:
        request_key, answer = trained
        summand, after = read_summand(answer.frame.blobs[SUMMAND]), _base_after(request_key, answer)
        own = hashlib.sha256(answer.frame.blobs[SUMMAND]).hexdigest()
        tensors, base = answer.about["tensors"], answer.about["base"]
        values = str(run), int(number), attempt, request_key["config"], tensors, base, len(summand)
        agreement = Agreement(*values, *listed, answer.about.get("noise", ""), *together)
    agreement.require_same(proposal)
    if own:
        mask_ledger.begin(store.records, agreement, after, own)
    content, sign = mask_ledger.kept(store.records, agreement), partial(mask_ledger.sign, store.records)
    silo = SiloRound(settings.name, identity, peers, agreement, summand, sign, content)
    reply, data = silo.answer(str(stage), texts)
    mask_ledger.keep(store.records, agreement, silo.kept)
    blobs = {MASKED: tensor_bytes({MASKED: torch.frombuffer(bytearray(data), dtype=torch.int64)})} if data else {}
    fields = {"silo": settings.name, "round": int(number), "told": reply}
    return SiloAnswer(Frame("masks", fields, blobs), {"stage": stage, "shown": sorted(texts)})
