"""Write tensors as safetensors bytes and read them back, fast for many small tensors.

`safetensors.torch.save` passes every tensor through NumPy and compares all pairs of storages; a federation of a
thousand silos writes hundreds of thousands of small tensors per round.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, serialize
from safetensors.torch import load
from torch import Tensor

from silotune.core.files import damage_named, read_bytes, write_bytes

_MOST_AXES = 8
"""Axes of a tensor that is read with others at once."""

_TYPES = {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16}


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Serialize tensors as a safetensors file.

    Returns:
        The file's content.
    """
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}  # alive until serialized
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in contiguous.items()
    }
    return bytes(serialize(specs, metadata=metadata))


def read_tensors(content: bytes) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, sorted by name (the library's order is random).

    Raises:
        SafetensorError: the content is not a safetensors file.
    """
    try:
        return dict(sorted(load(content).items()))
    except (KeyError, RuntimeError) as error:  # a dtype that PyTorch lacks, or a shape beyond its integers
        raise SafetensorError(f"tensors that cannot be read ({error})") from error


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> str:
    """Replace a file by tensors, and return its sha256, which is recorded beside it.

    Raises:
        OSError: the file cannot be written; its old content stays.
    """
    content = tensor_bytes(tensors, metadata)
    write_bytes(path, content)
    return hashlib.sha256(content).hexdigest()


def read_tensor_file(folder: Path, name: str, files: Mapping[str, str] | None) -> dict[str, Tensor]:
    """Read a file of tensors that a run, a silo or an export wrote, if it still is as it was written.

    Args:
        folder: the file's folder.
        name: the file's name in the folder, and in `files`.
        files: the recorded sha256 of each file; None: the folder is from before they were recorded.

    Raises:
        InputError: the file is missing or damaged, or another one than was recorded.
    """
    path = folder / name
    with damage_named(path, "; copy it anew, or make it again (a run's models: `silotune import RUN`)"):
        content = read_bytes(path)
        if files is None:
            _say_once(f"note: {folder} is from before sha256 were recorded, so damage is not noticed")
        elif hashlib.sha256(content).hexdigest() != files.get(name):
            raise ValueError("its sha256 is not the recorded one")
        return read_tensors(content)


@cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)


def read_block(content: bytes) -> tuple[dict[str, Tensor], Tensor | None]:
    """Read tensors as `read_tensors` does, in half the time, by copying all numbers at once.

    Each tensor is then a part of one block.

    Returns:
        The tensors, and the one tensor that holds them all; None if they have several types and are read separately.

    Raises:
        SafetensorError: the content is not a safetensors file.
    """
    layout = _plain_layout(content)
    if layout is None:
        return read_tensors(content), None
    dtype, entries = layout
    numbers = bytearray(memoryview(content)[8 + int.from_bytes(content[:8], "little") :])
    tensors = {}
    for name in sorted(entries):
        shape, start, count = entries[name]
        tensors[name] = torch.frombuffer(numbers, dtype=dtype, count=count, offset=start).view(shape)
    return tensors, torch.frombuffer(numbers, dtype=dtype)


def _plain_layout(content: bytes) -> tuple[torch.dtype, dict[str, tuple[list[int], int, int]]] | None:
    """Return the type of all tensors, and each one's shape, first byte and count of numbers.

    None if they have several types, or if anything is unusual (an empty tensor) or wrong: the library says what.
    """
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size]
    if len(header) < size or not header.startswith(b"{") or b"\\u" in header:
        return None
    entries: dict[str, tuple[list[int], int, int]] = {}
    ends: dict[int, int] = {}
    kinds = set()
    try:
        for name, entry in json.loads(header.decode("utf-8")).items():
            if name == "__metadata__":
                if not all(type(value) is str for value in entry.values()):
                    return None
                continue
            shape, (start, end) = entry["shape"], entry["data_offsets"]
            usual = type(shape) is list and len(shape) <= _MOST_AXES and type(start) is type(end) is int
            if len(entry) != 3 or not usual or not all(type(length) is int and length > 0 for length in shape):
                return None
            entries[name] = (shape, start, math.prod(shape))
            ends[start] = end
            kinds.add(entry["dtype"])
        [kind] = kinds
        dtype = _TYPES[kind]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    reached = 0  # tensors must follow one another without gap
    for _, start, count in sorted(entries.values(), key=itemgetter(1)):
        if start != reached or ends[start] != start + count * dtype.itemsize:
            return None
        reached = ends[start]
    return (dtype, entries) if 8 + size + reached == len(content) else None


def read_metadata(content: bytes, key: str) -> Any:
    """Read a JSON value from the metadata of a safetensors file.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: the key is missing or its value is not JSON.
    """
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"][key])
