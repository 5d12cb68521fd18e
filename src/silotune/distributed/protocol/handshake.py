"""Compare coordinator and silo before round 1, and refuse another protocol, version, backbone or method.

It also says which part of a configuration silos receive, and names the key that differs from the agreed one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PlainValidator, StrictInt, StrictStr, TypeAdapter, ValidationError

from silotune.config import BackboneConfig, Config, dump
from silotune.config.coordinator import FederationConfig
from silotune.config.data import DataConfig, PartitionConfig
from silotune.config.parse import validated
from silotune.config.trees import parse_tree
from silotune.data.tasks import Task, read_task
from silotune.distributed.protocol.frames import PROTOCOL, Frame, HandshakeRefused
from silotune.errors import InputError
from silotune.methods import is_centralized
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


@dataclass(frozen=True)
class Hello:
    """A silo's reply to the greeting.

    Args:
        rank: the rank of its adapters, where its operator bounds it below the run's; else None.
        masks: of a run that sums under masks; else `NO_LIST`.
        noise: how many times the noise that a run with noise on rows asks for it gets here; else None.
        shares: the noise that silos add together (`SharedNoise.text`); empty where each adds its own.
    """

    silo: StrictStr
    identity: Identity
    task: Annotated[Task, PlainValidator(read_task)]
    texts: Annotated[StrictInt, Field(ge=1, le=2)]
    rank: Annotated[StrictInt, Field(ge=1)] | None = None
    masks: PinnedList = NO_LIST
    noise: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    shares: StrictStr = ""

    @classmethod
    def read(cls, frame: Frame) -> Hello:
        """Parse a silo's reply to the greeting."""
        fields, silo = frame.fields, f"silo {str(frame.fields.get('silo'))[:80]!r}"
        if frame.kind != "hello":
            reason = str(fields.get("reason", f"answered the greeting with {frame.kind[:20]!r}"))
            raise HandshakeRefused(reason if silo in reason else f"{silo}: {reason}")
        if "identity" in fields:
            check_protocol(str(fields.get("silo"))[:80], PROTOCOL, protocol_of(fields["identity"]))
        try:
            return _HELLO.validate_python(fields)
        except ValidationError as error:
            first = error.errors()[0]
            field, *inner = first["loc"]
            if first["type"] == "missing" and not inner:
                raise HandshakeRefused(f"{silo}: a hello without {field!r}") from None
            raise HandshakeRefused(f"{silo}: {field}: not what a silo says of itself") from None


_HELLO = TypeAdapter(Hello)


def protocol_of(identity: object) -> int | None:
    """Return the protocol number in an identity's plain values; None if it is missing."""
    number = identity.get("protocol") if isinstance(identity, dict) else None
    return number if type(number) is int and 0 <= number <= _LARGEST_PROTOCOL else None


def check_protocol(silo: str, coordinator_protocol: int | None, silo_protocol: int | None) -> None:
    """Compare protocol numbers, before anything else of an identity is read: its fields may differ with the number."""
    if coordinator_protocol != silo_protocol or silo_protocol is None:
        actual, expected = ("none" if number is None else number for number in (silo_protocol, coordinator_protocol))
        raise HandshakeRefused(
            f"silo {silo!r}: identity: protocol {actual}, the coordinator's: {expected}; install the same silotune on "
            "both sides"
        )


def check_identity(silo: str, coordinator_identity: Identity, silo_identity: Identity) -> None:
    """Compare a silo's identity with the coordinator's."""
    for name, label in _COMPARED_FIELDS.items():
        expected, actual = getattr(coordinator_identity, name), getattr(silo_identity, name)
        if expected != actual:
            raise HandshakeRefused(
                f"silo {silo!r}: another {label}: {_short(actual)}, the coordinator's: {_short(expected)}"
            )
    if coordinator_identity.shapes is None or silo_identity.shapes is None:
        return
    for name in sorted({*coordinator_identity.shapes, *silo_identity.shapes}):
        reference, shape = coordinator_identity.shapes.get(name), silo_identity.shapes.get(name)
        if reference != shape:
            raise HandshakeRefused(
                f"silo {silo!r}: other part shapes: {name!r} is {_shape(shape)}, the coordinator's: {_shape(reference)}"
            )


def _short(value: str) -> str:
    return value if len(value) <= 20 else f"{value[:12]}…"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(tuple(shape))


def text_digest(text: str) -> str:
    """Return the sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def recipe_digest(config: Config) -> str:
    """Return the sha256 of a configuration as it was sent, without its section `federation`, which may change."""
    return text_digest(json.dumps(config.model_dump(mode="json", exclude={"federation"}), sort_keys=True))


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


_SENT_KEYS = (
    *("merge", "ratio", "seed", "rows_per_silo", "train_rows", "validation_rows", "test_rows"),
    *("allow_cut", "long_texts", "window_overlap", "windows_per_row"),
)
"""The keys of `data` that say how a silo splits its own rows, and what becomes of long ones."""

_PER_PARTY = {"backbone", "start", "precision", "federation", "description"}
"""Keys that differ between parties, or that the handshake compares in another form."""


RUN_START = re.compile(r"run-([0-9a-f]{16})")
"""What silos receive as `start`, where the run goes on from a run of this federation: that one's id."""


def check_federated(config: Config) -> None:
    """Refuse configurations that need the rows of several silos in one place."""
    if is_centralized(config.method.name):
        raise InputError(f"method={config.method.name}: trains in one place, not in silos; use --engine inprocess")
    if config.work == "scoring" and (config.aggregation.secure or config.privacy.unit is not None):
        raise InputError(
            "rounds=0: scores have no noise and are not summed under masks, so that nothing would leave; allowed: "
            "without aggregation.secure and privacy.unit"
        )
    if config.aggregation.least is not None or config.aggregation.colluders != 1:
        raise InputError(
            "aggregation.least, aggregation.colluders: of a simulation; over machines each silo.yaml has masked.least "
            "and masked.colluders"
        )
    if config.attack.name != "none":
        raise InputError("attack: simulated with --engine inprocess only; here silos are what they are")
    if config.cohort not in (None, 1, "auto"):
        raise InputError(f"cohort={config.cohort}: every silo trains on its own machine; allowed: cohort=1 or auto")
    for key in ("test_time", "unseen", "new_silos"):
        if getattr(config.evaluation, key):
            raise InputError(f"evaluation.{key}: needs other silos' rows; use --engine inprocess")
    if config.evaluation.finish_per_round:
        raise InputError("evaluation.finish_per_round: sets silos back; use --engine inprocess")


def wire_config(config: Config, silos: Iterable[str]) -> str:
    """Write a resolved configuration as YAML for the silos, without local paths and the secret's file name."""
    fields = {key: getattr(config.data, key) for key in _SENT_KEYS}
    wired = config.replace(
        backbone=BackboneConfig(name=Path(config.backbone.name).name, quantization=config.backbone.quantization),
        start=None if config.start is None else Path(config.start).name,
        threads=None,
        device="auto",
        privacy={"secret": config.privacy.secret and "own"},
        silos=[],
        data=DataConfig(**fields),
        partition=PartitionConfig(),
        federation=FederationConfig(silos=sorted(silos)),  # deadlines and quorum are the coordinator's own
    )
    return dump(wired)


def parse_wire_config(text: str) -> Config:
    """Parse a configuration that `wire_config` wrote."""
    return validated(parse_tree(text, "of the coordinator"))


def check_agreed(config: Config, agreed: Config) -> None:
    """Refuse a configuration that differs from the one agreed on."""
    values, agreed_values = (
        parse_wire_config(wire_config(side, ["silo"])).model_dump(mode="json", exclude=_PER_PARTY)
        for side in (config, agreed)
    )
    for key in values:
        if values[key] != agreed_values[key]:
            raise InputError(f"configuration: {key} is {values[key]!r}, agreed on was {agreed_values[key]!r}")
