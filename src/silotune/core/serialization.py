"""`tensor_bytes` and `read_tensors`: tensors to safetensors bytes and back, fast for many small tensors.

`safetensors.torch.save` passes every tensor through NumPy and compares all pairs of storages; a federation of a
thousand silos writes hundreds of thousands of small tensors per round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError, TensorSpec, serialize
from safetensors.torch import load
from torch import Tensor


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Serialize tensors as a safetensors file.

    Args:
        tensors: tensors by name, on any device and with any strides.
        metadata: entries of the file's header.

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


def read_metadata(content: bytes, key: str) -> Any:
    """Read a JSON value from the metadata of a safetensors file.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: the key is missing or its value is not JSON.
    """
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"][key])
