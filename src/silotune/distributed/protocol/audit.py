"""Describe a frame for the audit log, and sum a log up by run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from silotune.distributed.protocol.frames import Frame, ProtocolError, decode

_LONGEST = 500
"""Characters of a text that another party wrote."""


def describe_frame(data: bytes, frame: Frame | None = None) -> dict[str, Any]:
    """Describe a frame: kind, run, round, tensors with shapes, numbers, bytes and digest.

    Args:
        data: the frame as it goes over the wire; other bytes are of kind `?`.
        frame: the same, if it is decoded already.
    """
    size = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    try:
        frame = frame or decode(data)
    except ProtocolError:
        return {"kind": "?", **size}
    return {"kind": frame.kind[:40], **_said(frame), **_tensors(frame), **size}


def request_of(request: Frame | None) -> dict[str, Any]:
    """Return run and round of a request; None where it does not say them, or cannot be decoded."""
    fields = {} if request is None else request.fields
    run, number = fields.get("run"), fields.get("round")
    return {"run": run[:40] if isinstance(run, str) else None, "round": number if type(number) is int else None}


def _said(frame: Frame) -> dict[str, Any]:
    """Return the numbers and texts in a frame's header that are worth a line."""
    said: dict[str, Any] = {}
    for name in ("metrics", "scores"):
        if frame.fields.get(name):
            said[name] = _bounded(frame.fields[name])
    for name in ("silo", "reason", "note"):
        if frame.fields.get(name):
            said[name] = str(frame.fields[name])[:_LONGEST]
    return said


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


def totals(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sum up an audit log per run: messages by kind, numbers, bytes, rounds, and the ε of all noised messages.

    The same message sent again (the same digest) counts as a message; its noise, numbers and ε are no new ones.
    """
    runs: dict[str, dict[str, Any]] = {}
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        if "sha256" not in entry:
            continue
        run = str(entry.get("run") or "none")
        total = runs.setdefault(
            run, {"messages": 0, "kinds": {}, "numbers": 0, "bytes": 0, "rounds": 0, "epsilon": 0.0, "first": ""}
        )
        kind = " ".join(str(entry[name]) for name in ("direction", "kind") if name in entry)
        total["first"] = total["first"] or entry["time"]
        total["last"] = entry["time"]
        total["messages"] += 1
        total["kinds"][kind] = total["kinds"].get(kind, 0) + 1
        total["bytes"] += entry["bytes"]
        if (run, entry["sha256"]) not in seen:
            seen.add((run, entry["sha256"]))
            total["numbers"] += entry.get("numbers") or 0
            total["epsilon"] += entry.get("epsilon") or 0.0
        if entry["kind"] in ("answer", "round"):
            total["rounds"] = max(total["rounds"], entry.get("round") or 0)
    return runs
