"""Compare coordinator and silo before round 1, and refuse another protocol, version, backbone or method.

`agreement.py` says which part of a configuration is sent, and names keys that differ from the agreed one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ConfigDict, StrictInt, StrictStr, TypeAdapter, ValidationError

from silotune.data.tasks import Task, read_task
from silotune.distributed.protocol.frames import PROTOCOL, Frame, HandshakeRefused
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.quantization import NONE
from silotune.version import __version__

_COMPARED_FIELDS: Mapping[str, str] = {
    "version": "silotune",
    "precision": "precision",
    "backbone": "backbone (sha256 of its weights)",
    "tokenizer": "tokenizer (sha256)",
}
"""Identity fields compared in the handshake, in order, with their display names."""

_LARGEST_PROTOCOL = 10**6


@dataclass(frozen=True)
class Identity:
    """The versions and settings that must be equal on both sides.

    Args:
        version: silotune's version.
        backbone: sha256 of the weights.
        tokenizer: sha256, as `tokenizer_digest`.
        precision: the backbone's precision, and its quantization if it has one (`bf16, int8`).
        shapes: shapes of the shared tensors; None until the silos' tasks are known.
        protocol: number of the message format.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    version: StrictStr
    backbone: StrictStr
    tokenizer: StrictStr
    precision: StrictStr
    shapes: Mapping[str, tuple[int, ...]] | None = None
    protocol: StrictInt = PROTOCOL

    def fields(self) -> dict[str, Any]:
        """Return the identity as plain values for a frame."""
        return asdict(self)

    @classmethod
    def of(cls, backbone: Backbone) -> Identity:
        """Return this process's identity over a loaded backbone, without shapes."""
        quantized = "" if backbone.quantization == NONE else f", {backbone.quantization}"
        return cls(__version__, backbone.fingerprint, tokenizer_digest(backbone), f"{backbone.precision}{quantized}")

    @classmethod
    def read(cls, fields: object) -> Identity:
        """Parse an identity from a frame; refuse a field that is missing, unexpected or of another type."""
        try:
            return _IDENTITY.validate_python(fields)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"][:1]))
            raise HandshakeRefused(f"identity: {where}: not what a silotune party says of itself") from None


_IDENTITY = TypeAdapter(Identity)


PinnedList = tuple[StrictStr, StrictInt, StrictInt]
"""What a silo tells of its list of peers: fingerprint, length, and the fewest silos of a sum under masks."""

NO_LIST: PinnedList = "", 0, 0

_PINNED_LIST = TypeAdapter(PinnedList)


@dataclass(frozen=True)
class Hello:
    """A silo's reply to the greeting.

    Args:
        silo: its name.
        identity: what it runs.
        task: its task.
        texts: the number of texts in a row.
        rank: the rank of its adapters, where its operator bounds it below the run's; else None.
        masks: of a run that sums under masks; else `NO_LIST`.
    """

    silo: str
    identity: Identity
    task: Task
    texts: int
    rank: int | None = None
    masks: PinnedList = NO_LIST

    @classmethod
    def read(cls, frame: Frame) -> Hello:
        """Parse a silo's reply to the greeting.

        Raises:
            HandshakeRefused: naming the silo and the missing or invalid field, or the silo's own reason to refuse.
        """
        fields, silo = frame.fields, f"silo {str(frame.fields.get('silo'))[:80]!r}"
        if frame.kind != "hello":
            reason = str(fields.get("reason", f"answered the greeting with {frame.kind[:20]!r}"))
            raise HandshakeRefused(reason if silo in reason else f"{silo}: {reason}")
        for name in ("identity", "task", "texts"):
            if name not in fields:
                raise HandshakeRefused(f"{silo}: a hello without {name!r}")
        check_protocol(str(fields.get("silo"))[:80], PROTOCOL, protocol_of(fields["identity"]))
        try:
            identity = Identity.read(fields["identity"])
        except HandshakeRefused as refusal:
            raise HandshakeRefused(f"{silo}: {refusal}") from refusal
        try:
            task = read_task(fields["task"])
        except ValueError as error:
            raise HandshakeRefused(f"{silo}: task: does not say what its task is") from error
        texts = fields["texts"]
        if type(texts) is not int or not 1 <= texts <= 2:
            raise HandshakeRefused(f"{silo}: texts: a row has one or two (it says {str(texts)[:80]!r})")
        rank = fields.get("rank")
        if rank is not None and (type(rank) is not int or rank < 1):
            raise HandshakeRefused(f"{silo}: rank: not a rank (it says {str(rank)[:80]!r})")
        try:
            masks = _PINNED_LIST.validate_python(fields.get("masks", NO_LIST))
        except ValidationError as error:
            raise HandshakeRefused(f"{silo}: masks: does not say what its list of peers is") from error
        return cls(str(fields["silo"]), identity, task, texts, rank, masks)


def protocol_of(identity: object) -> int | None:
    """Return the protocol number in an identity's plain values; None if it is missing."""
    number = identity.get("protocol") if isinstance(identity, dict) else None
    return number if type(number) is int and 0 <= number <= _LARGEST_PROTOCOL else None


def check_protocol(silo: str, coordinator_protocol: int | None, silo_protocol: int | None) -> None:
    """Compare protocol numbers, before anything else of an identity is read: its fields may differ with the number.

    Args:
        silo: the silo's name, for the message.
        coordinator_protocol: the coordinator's number; None if it sent none.
        silo_protocol: the silo's number; None if it sent none.

    Raises:
        HandshakeRefused: naming the silo and both numbers.
    """
    if coordinator_protocol != silo_protocol or silo_protocol is None:
        actual, expected = ("none" if number is None else number for number in (silo_protocol, coordinator_protocol))
        raise HandshakeRefused(
            f"silo {silo!r}: identity: protocol {actual}, the coordinator's: {expected}; install the same silotune on "
            "both sides"
        )


def check_identity(silo: str, coordinator_identity: Identity, silo_identity: Identity) -> None:
    """Compare a silo's identity with the coordinator's.

    Args:
        silo: the silo's name, for the message.
        coordinator_identity: the coordinator's identity.
        silo_identity: the silo's identity.

    Raises:
        HandshakeRefused: naming the silo, the first difference, and both values.
    """
    for name, label in _COMPARED_FIELDS.items():
        expected, actual = getattr(coordinator_identity, name), getattr(silo_identity, name)
        if expected != actual:
            raise HandshakeRefused(
                f"silo {silo!r}: another {label}: {_short(actual)}, the coordinator's: {_short(expected)}"
            )
    if coordinator_identity.shapes is None or silo_identity.shapes is None:
        return
    for name in sorted({*coordinator_identity.shapes, *silo_identity.shapes}):
        wanted, shape = coordinator_identity.shapes.get(name), silo_identity.shapes.get(name)
        if wanted != shape:
            raise HandshakeRefused(
                f"silo {silo!r}: other part shapes: {name!r} is {_shape(shape)}, the coordinator's: {_shape(wanted)}"
            )


def _short(value: str) -> str:
    return value if len(value) <= 20 else f"{value[:12]}…"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(tuple(shape))


def text_digest(text: str) -> str:
    """Return the sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def tokenizer_digest(backbone: Backbone) -> str:
    """Return the sha256 of the tokenizer; truncation and padding are left out, because calls change them."""
    tokenizer: Any = backbone.tokenizer
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        content = json.loads(fast.to_str())
        for name in ("truncation", "padding"):
            content.pop(name, None)
    else:
        content = tokenizer.get_vocab()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return text_digest(json.dumps([type(tokenizer).__name__, content, special], sort_keys=True))
