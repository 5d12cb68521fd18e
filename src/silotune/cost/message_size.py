"""Compute the exact bytes of update and broadcast from the shapes of the shared parts."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from math import prod

import torch

from silotune.communication.messages import Expected, broadcast_message, change_message, shared_tensors, update_message
from silotune.communication.uplink import NO_UPLINK, UplinkPipeline
from silotune.core.tensors import count_parameters, flatten
from silotune.methods.parts import Part, Scope, names_with

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Part → tensor → shape."""


SILO, ROWS = "silo", 1000
"""Silo name and row count in the counted message; a longer name makes the header longer."""

_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The safetensors format's names of dtypes, in the order in which it writes tensors; within a dtype, by name."""

_LARGEST = 2**28
"""Messages above this number of bytes are computed from their header instead of being built."""


def message_sizes(
    shapes: Shapes,
    parts: Mapping[str, Part],
    uplink: UplinkPipeline = NO_UPLINK,
    leaving: Collection[str] | None = None,
) -> tuple[int, int]:
    """Measure one silo's update and the coordinator's broadcast.

    Real messages with tensors of zeros are built; for those above `_LARGEST` the same number is computed from the
    header of the safetensors format.

    Args:
        shapes: the shapes of all parts' tensors.
        parts: with their scopes.
        uplink: steps that the update goes through.
        leaving: the shared parts that an update holds; None: all of them.

    Returns:
        (bytes of the update, bytes of the broadcast); 0 where no part is shared.
    """
    shared = {name: shapes[name] for name in names_with(parts, Scope.SHARED)}
    sent = {name: shapes[name] for name in (shared if leaving is None else leaving)}
    numbers = sum(prod(shape) for tensors in shared.values() for shape in tensors.values())
    if not numbers:
        return 0, 0
    if 4 * numbers > _LARGEST:
        return _computed_update(sent, uplink), computed_size(shared, {"round": 1})
    zeros = {part: {name: torch.zeros(shape) for name, shape in tensors.items()} for part, tensors in shared.items()}
    assert count_parameters(flatten(zeros)) == numbers
    sent_parts = {name: parts[name] for name in sent}
    if uplink.names:
        written, _ = uplink.send(shared_tensors(zeros, sent_parts), {}, SILO, 1)
        update = change_message(written, uplink.label, 1, SILO, ROWS)
    else:
        update = update_message(zeros, sent_parts, 1, SILO, ROWS)
    return len(update), len(broadcast_message(zeros, 1))


def _computed_update(shared: Shapes, uplink: UplinkPipeline) -> int:
    fields: dict[str, str | int] = {"round": 1, "silo": SILO, "rows": ROWS}
    if not uplink.names:
        return computed_size(shared, fields)
    flat = {f"{part}/{name}": shape for part, tensors in shared.items() for name, shape in tensors.items()}
    return _size(uplink.expected(Expected(flat)), fields | {"uplink": uplink.label})


def computed_size(shapes: Shapes, fields: Mapping[str, str | int]) -> int:
    """Compute the bytes of a safetensors file of float32 tensors: header length, header padded to 8 bytes, tensors."""
    flat = {f"{part}/{name}": shape for part, tensors in shapes.items() for name, shape in tensors.items()}
    return _size(Expected(flat), fields)


def _size(expected: Expected, fields: Mapping[str, str | int]) -> int:
    header: dict[str, object] = {"__metadata__": {"silotune": json.dumps(dict(fields), sort_keys=True)}}
    end = 0
    order = list(_DTYPES)
    for name in sorted(expected.shapes, key=lambda name: (order.index(expected.dtype(name)), name)):
        start, end = end, end + expected.dtype(name).itemsize * prod(expected.shapes[name])
        dtype = _DTYPES[expected.dtype(name)]
        header[name] = {"dtype": dtype, "shape": list(expected.shapes[name]), "data_offsets": [start, end]}
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-length // 8) * 8 + end
