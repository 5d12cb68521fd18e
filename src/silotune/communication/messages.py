"""Make and check the messages between silos and coordinator: safetensors bytes of shared parts alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from torch import Tensor

from silotune.core.serialization import read_block, read_metadata, read_tensors, tensor_bytes
from silotune.core.tensors import JoinedLayout, State, Tensors, flatten, unflatten
from silotune.errors import InputError
from silotune.methods.parts import Part, Scope

Fields = dict[str, str | int | float]

_METADATA = "silotune"

BROADCAST_FIELDS: Mapping[str, type] = {"round": int}

UPDATE_FIELDS: Mapping[str, type] = {"round": int, "silo": str, "rows": int}

CHANGE_FIELDS: Mapping[str, type] = {**UPDATE_FIELDS, "uplink": str}
"""Fields of an update that holds a change instead of the parts; `uplink` names the steps of the uplink."""


class MessageRefused(InputError):
    """A malformed message; the round continues without it."""


@dataclass(frozen=True)
class Expected:
    """The shapes and dtypes of a message's tensors, by "part/tensor" name; float32 without an entry in `dtypes`."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def like(cls, tensors: Tensors) -> Expected:
        """Return the shapes of these tensors."""
        return cls({name: tuple(tensor.shape) for name, tensor in tensors.items()})

    @property
    def bytes(self) -> int:
        """Bytes of the tensors, without the message's header."""
        return sum(math.prod(shape) * self.dtype(name).itemsize for name, shape in self.shapes.items())

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype."""
        return self.dtypes.get(name, torch.float32)


def shared_tensors(state: State, parts: Mapping[str, Part]) -> Tensors:
    """Return the shared parts' tensors, by "part/tensor" name: the only way from a silo's state into a message."""
    return flatten({name: state[name] for name, part in parts.items() if part.scope is Scope.SHARED})


def broadcast_message(shared: State, round_number: int) -> bytes:
    """Return the message that opens a round: the shared parts and the round's number."""
    return pack(flatten(shared), {"round": round_number})


def read_broadcast(message: bytes, expected: Expected) -> tuple[State, int]:
    """Return the shared parts and the round's number."""
    tensors, fields = unpack(message, expected, BROADCAST_FIELDS)
    return unflatten(tensors), int(fields["round"])


def update_message(state: State, parts: Mapping[str, Part], round_number: int, silo: str, rows: int) -> bytes:
    """Return a silo's update: exactly the shared parts, the round, the silo's name and its row count."""
    return pack(shared_tensors(state, parts), {"round": round_number, "silo": silo, "rows": rows})


def change_message(written: Tensors, uplink: str, round_number: int, silo: str, rows: int) -> bytes:
    """Return the update of a silo with an uplink: the processed change of the shared parts, and the same fields."""
    return pack(written, {"round": round_number, "silo": silo, "rows": rows, "uplink": uplink})


def with_rows(message: bytes, rows: int) -> bytes:
    """Return the update with another row count; its tensors are read only if the count differs."""
    fields = read_metadata(message, _METADATA)
    return message if fields.get("rows") == rows else pack(read_tensors(message), fields | {"rows": rows})


def pack(tensors: Tensors, fields: Fields) -> bytes:
    """Serialize tensors and fields."""
    return tensor_bytes(tensors, {_METADATA: json.dumps(fields, sort_keys=True)})


def unpack(message: bytes, expected: Expected, fields: Mapping[str, type]) -> tuple[Tensors, Fields]:
    """Read a message and check it; these fields must be there, with their types."""
    try:
        (tensors, numbers), values = read_block(message), read_metadata(message, _METADATA)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise MessageRefused(f"not a silotune message ({str(error)[:80]})") from error
    if not isinstance(values, dict) or values.keys() != fields.keys():
        raise MessageRefused(f"fields must be {sorted(fields)}")
    for name, kind in fields.items():
        if type(values[name]) is not kind:
            raise MessageRefused(f"field {name!r} must be {kind.__name__}")
    check_tensors(tensors, expected, numbers)
    return tensors, values


def check_tensors(tensors: Tensors, expected: Expected, numbers: Tensor | None = None) -> None:
    """Refuse tensors that are not as expected; `numbers` holds all of theirs as one tensor, if there is one."""
    missing = sorted(expected.shapes.keys() - tensors.keys())
    extra = sorted(tensors.keys() - expected.shapes.keys())
    if missing or extra:
        raise MessageRefused(f"tensors missing {missing[:3]}, unexpected {extra[:3]}")
    for name, shape in expected.shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise MessageRefused(f"tensor {name!r} has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.dtype is not expected.dtype(name):
            raise MessageRefused(f"tensor {name!r} has dtype {tensor.dtype}, expected {expected.dtype(name)}")
    blocks = JoinedLayout(tensors).join(tensors) if numbers is None else [numbers]
    # all numbers are finite if the least and the greatest are, which takes one pass and no mask
    if not all(bool(torch.isfinite(torch.stack(torch.aminmax(block))).all()) for block in blocks if block.numel()):
        name = next(name for name in expected.shapes if not torch.isfinite(tensors[name]).all())
        raise MessageRefused(f"tensor {name!r} holds NaN or infinity")


def message_numbers(message: bytes) -> int:
    """Count the numbers in a message's tensors, by its header alone."""
    header = json.loads(message[8 : 8 + int.from_bytes(message[:8], "little")])
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def size(tensors: Mapping[str, Tensor]) -> int:
    """Count the bytes of the tensors, without the header."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
