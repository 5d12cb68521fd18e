"""Tensors as safetensors bytes. `safetensors.torch.save` writes the same, in ten times the time for small tensors.

That function looks at every tensor through NumPy and compares all pairs of storages; a federation of a thousand silos
writes hundreds of thousands of small tensors a round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors import TensorSpec, serialize
from safetensors.torch import load
from torch import Tensor


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file; tensors may be on any device and of any strides."""
    kept = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}  # until they are read
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in kept.items()
    }
    return bytes(serialize(specs, metadata=metadata))


def read_tensors(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name; the library gives them in an order of chance.

    Raises:
        SafetensorError: for anything else.
    """
    return dict(sorted(load(content).items()))


def read_metadata(content: bytes, key: str) -> Any:
    """What was put as JSON into a safetensors file's metadata.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: where there is nothing of this kind.
    """
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"][key])
