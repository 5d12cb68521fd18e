"""The one wire type: a frame with a JSON header and named blobs, as bytes and over a worker's socket.

A frame consists of `SLT1`, the header's length (4 bytes), the header, and the concatenated blobs; the header lists
their names and sizes. On a socket the frame's length (8 bytes) comes first. The ClientApp imports this module and
starts anew for every message, so imports here must be fast.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from silotune.errors import InputError

MAGIC = b"SLT1"

PROTOCOL = 3
"""Number of the message format: the kinds of frames, their fields, and what both sides make of them.

Raise it with every change that a silo or coordinator from before would misread. It is apart from the package's version:
releases that talk to each other share a number.
"""

RUN_ID = re.compile(r"[0-9a-f]{16}")
"""A run's id, and the name of its folder."""

LARGEST_HEADER = 16 * 2**20

LARGEST_FRAME = 8 * 2**30

WAITS_FOR_APPROVAL = "waits for approval"
"""The beginning of a silo's reason while its operator has not decided about a run (frames of kind `waiting`)."""

MASKED = "masked"
"""The blob of a reply that holds numbers under masks, and the name of the tensor in it."""

_LONGEST = 500
"""Characters of another party's text in the audit log."""

PATIENCE = 24 * 3600.0
"""Default for the seconds that a ClientApp waits for its worker: longer than any round."""


class ProtocolError(Exception):
    """The bytes are not a frame, or the peer closed the connection or is too slow."""


class HandshakeRefused(InputError):
    """Raised when one side refuses the other or its request."""


@dataclass(frozen=True)
class Frame:
    """A message: its kind, its fields (JSON values), and its blobs by name."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the frame as bytes."""
        sizes = {name: len(self.blobs[name]) for name in sorted(self.blobs)}  # the header's order
        header = json.dumps({"kind": self.kind, "fields": self.fields, "blobs": sizes}, sort_keys=True).encode()
        return b"".join([MAGIC, struct.pack(">I", len(header)), header, *(self.blobs[name] for name in sizes)])


def decode(data: bytes) -> Frame:
    """Read a frame from its bytes."""
    kind, fields, sizes, start = _read_header(data)
    blobs = {}
    for name, size in sizes.items():
        blobs[name] = data[start : start + size]
        start += size
    return Frame(kind, fields, blobs)


def peek_kind(data: bytes) -> str:
    """Return a frame's kind from its header alone; blobs are not copied."""
    return _read_header(data)[0]


def _read_header(data: bytes) -> tuple[str, dict[str, Any], dict[str, int], int]:
    """Return kind, fields, sizes of the blobs by name, and the offset of the first blob."""
    if len(data) < 8 or data[:4] != MAGIC:
        raise ProtocolError("not a silotune frame")
    (length,) = struct.unpack(">I", data[4:8])
    if length > LARGEST_HEADER or 8 + length > len(data):
        raise ProtocolError("a frame's header is cut off")
    try:
        header = json.loads(data[8 : 8 + length])
        kind, fields, sizes = header["kind"], header["fields"], header["blobs"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError("a frame's header is damaged") from error
    valid = isinstance(kind, str) and isinstance(fields, dict) and isinstance(sizes, dict)
    if not valid or not all(type(size) is int and size >= 0 for size in sizes.values()):
        raise ProtocolError("a frame's header is damaged")
    if 8 + length + sum(sizes.values()) != len(data):
        raise ProtocolError("a frame's blobs are cut off, or followed by something")
    return kind, fields, sizes, 8 + length


def send(connection: socket.socket, data: bytes) -> None:
    """Write one frame's bytes to a socket."""
    connection.sendall(struct.pack(">Q", len(data)))
    connection.sendall(data)


def receive(
    connection: socket.socket,
    until: float | None = None,
    largest: int = LARGEST_FRAME,
    claim: Callable[[int], None] = lambda _length: None,
) -> bytes:
    """Read one frame's bytes from a socket; `claim` gets its length before it is read, and may refuse it."""
    (length,) = struct.unpack(">Q", _receive_exactly(connection, 8, until))
    if length > largest:
        raise ProtocolError(f"a frame of {length:,} bytes is too large (at most {largest:,})")
    claim(length)
    return _receive_exactly(connection, length, until)


def _receive_exactly(connection: socket.socket, count: int, until: float | None) -> bytes:
    """Read in chunks, so that a forged length cannot allocate memory."""
    chunks: list[bytes] = []
    while count:
        if until is not None:
            remaining = until - time.monotonic()
            if remaining <= 0:
                raise ProtocolError("no answer in time")
            connection.settimeout(remaining)
        try:
            chunk = connection.recv(min(count, 2**20))
        except TimeoutError as error:
            raise ProtocolError("no answer in time") from error
        except OSError as error:
            raise ProtocolError(f"the connection was closed ({error.strerror or error})") from error
        if not chunk:
            raise ProtocolError("the connection was closed")
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def ask_worker(path: str | Path, request: bytes, patience: float = PATIENCE) -> bytes:
    """Send a request to the worker behind a Unix socket and wait for its reply."""
    until = time.monotonic() + patience
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            _connect(connection, path, min(until, time.monotonic() + 30.0))
            connection.settimeout(patience)
        except OSError as error:
            raise ProtocolError(f"no worker answers on its socket ({error.strerror or error})") from error
        try:
            send(connection, request)
        except OSError as error:
            raise ProtocolError(f"the connection was closed ({error.strerror or error})") from error
        return receive(connection, until)


def _connect(connection: socket.socket, path: str | Path, until: float) -> None:
    """Connect, and try again while as many connections wait to be accepted as the kernel keeps."""
    while True:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        try:
            return connection.connect(str(path))
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.01)


def require_fields(values: Mapping[str, Any], *names: str) -> list[Any]:
    """Return the values of these names."""
    missing = [name for name in names if name not in values]
    if missing:
        raise ProtocolError(f"a frame without {missing[0]!r}")
    return [values[name] for name in names]


def check_run_id(run: str) -> None:
    """Refuse a malformed run id: it becomes part of paths."""
    if not RUN_ID.fullmatch(run):
        raise InputError(f"run id {run[:40]!r}: must be 16 hexadecimal digits")


def state_name(number: int, final: bool = False) -> str:
    """Return the name of a silo's state after a round, or after the final phases that follow it."""
    return f"{number:04d}{'-final' if final else ''}"


def printable(text: str, longest: int | None = None) -> str:
    """Return another party's text with control characters written out, which a terminal would obey."""
    short = text if longest is None or len(text) <= longest else f"{text[:longest]}…"
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in short)


# -- the audit log -----------------------------------------------------------------------------------------------------


def describe_frame(data: bytes, frame: Frame | None) -> dict[str, Any]:
    """Describe a frame and its bytes: kind, shapes, numbers, size and digest; what is no frame is of kind `?`."""
    size = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if frame is None:
        return {"kind": "?", **size}
    return {"kind": frame.kind[:40], **_said(frame), **_tensors(frame), **size}


def request_of(request: Frame | None) -> dict[str, Any]:
    """Return run and round of a request; None where it does not say them, or cannot be decoded."""
    fields = {} if request is None else request.fields
    run, number = fields.get("run"), fields.get("round")
    return {"run": run[:40] if isinstance(run, str) else None, "round": number if type(number) is int else None}


def _said(frame: Frame) -> dict[str, Any]:
    """Return the numbers and texts in a frame's header that are worth a line."""
    fields: dict[str, Any] = {}
    for name in ("metrics", "scores", "survey"):
        if frame.fields.get(name):
            fields[name] = _bounded(frame.fields[name])
    for name in ("silo", "reason", "note"):
        if frame.fields.get(name):
            fields[name] = str(frame.fields[name])[:_LONGEST]
    return fields


def _bounded(value: object) -> object:
    return value if len(json.dumps(value)) <= 20 * _LONGEST else str(value)[:_LONGEST]


def _tensors(frame: Frame) -> dict[str, Any]:
    """Return shapes by "part/tensor" name, and their count of numbers, of a frame's message or broadcast."""
    shapes: dict[str, Any] = {}
    for blob in frame.blobs.values():
        try:
            header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")]) if blob else {}
            shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
            numbers = sum(math.prod(shape) for shape in shapes.values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {"tensors": "?", "numbers": None}
    return {"tensors": shapes, "numbers": numbers} if shapes else {"tensors": {}, "numbers": 0}
