"""Compute the exact bytes of update and broadcast from the shapes of the shared parts."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from math import prod

import torch

from silotune.communication.messages import Expected
from silotune.communication.uplink import NO_UPLINK, UplinkPipeline
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


def message_sizes(
    shapes: Shapes,
    parts: Mapping[str, Part],
    uplink: UplinkPipeline = NO_UPLINK,
    leaving: Collection[str] | None = None,
) -> tuple[int, int]:
    """Compute the bytes of one silo's update and of the coordinator's broadcast; both 0 where no part is shared.

    Args:
        shapes: the shapes of all parts' tensors.
        parts: with their scopes.
        uplink: steps that the update goes through.
        leaving: the shared parts that an update holds; None: all of them.
    """
    shared = names_with(parts, Scope.SHARED)
    if not any(prod(shape) for name in shared for shape in shapes[name].values()):
        return 0, 0
    sent, fields = _expected(shapes, shared if leaving is None else leaving), {"round": 1, "silo": SILO, "rows": ROWS}
    if uplink.names:
        sent, fields = uplink.expected(sent), fields | {"uplink": uplink.label}
    return _size(sent, fields), _size(_expected(shapes, shared), {"round": 1})


def _expected(shapes: Shapes, parts: Collection[str]) -> Expected:
    return Expected({f"{part}/{name}": shape for part in parts for name, shape in shapes[part].items()})


def _size(expected: Expected, fields: Mapping[str, object]) -> int:
    """Compute the bytes of a safetensors file: header length, header padded to 8 bytes, tensors."""
    header: dict[str, object] = {"__metadata__": {"silotune": json.dumps(dict(fields), sort_keys=True)}}
    end = 0
    order = list(_DTYPES)
    for name in sorted(expected.shapes, key=lambda name: (order.index(expected.dtype(name)), name)):
        start, end = end, end + expected.dtype(name).itemsize * prod(expected.shapes[name])
        dtype = _DTYPES[expected.dtype(name)]
        header[name] = {"dtype": dtype, "shape": list(expected.shapes[name]), "data_offsets": [start, end]}
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-length // 8) * 8 + end
