"""What a run's adapters begin as: a LoRA from elsewhere instead of a draw (`start=`).

Every adapter of the method begins as this LoRA, private ones too: mixes whose weights sum to 1 then begin as the model
that was imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from silotune.core.serialization import read_metadata, read_tensors, tensor_bytes
from silotune.core.tensors import Tensors
from silotune.errors import InputError

if TYPE_CHECKING:
    pass


FILE = "start.safetensors"
"""The copy that a run keeps in its folder."""

_METADATA = "silotune-start"


@dataclass(frozen=True)
class InitialAdapter:
    """A LoRA under the backbone's module names (`<module>.lora_A.weight`, `<module>.lora_B.weight`), float32.

    Args:
        tensors: its tensors.
        r: its rank.
        alpha: its scale is alpha / r.
        sites: the words of `tuner.sites` that name its modules.
    """

    tensors: Tensors
    r: int
    alpha: float
    sites: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The `key=value` words of a run with such adapters."""
        sites = ",".join(self.sites)
        return ["tuner=lora", f"tuner.r={self.r}", f"tuner.alpha={self.alpha:.10g}", f"tuner.sites={sites}"]

    def pack(self) -> bytes:
        """As a file of safetensors."""
        fields = {"tuner": "lora", "r": self.r, "alpha": self.alpha, "sites": list(self.sites)}
        return tensor_bytes(self.tensors, {_METADATA: json.dumps(fields)})


def _unpack(path: Path) -> InitialAdapter:
    try:
        content = path.read_bytes()
        tensors, fields = read_tensors(content), read_metadata(content, _METADATA)
        start = InitialAdapter(tensors, int(fields["r"]), float(fields["alpha"]), tuple(map(str, fields["sites"])))
    except OSError as error:
        raise InputError(f"start: {path} cannot be read ({error.strerror}); {_ALLOWED}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"start: {path} is not what `silotune import` writes; {_ALLOWED}") from error
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float32 or not torch.isfinite(tensor).all():
            raise InputError(f"start: {path}: tensor {name!r} is not made of finite float32 numbers")
    return start


_ALLOWED = "allowed: a folder in peft's layout, or a file that `silotune import` wrote"
