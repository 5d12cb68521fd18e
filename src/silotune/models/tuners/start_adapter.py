"""Store the LoRA that a run starts with (key `start`), and check that it fits the run's tuner.

Every adapter of the method starts as this LoRA, private ones too: mixes whose weights sum to 1 then start as the
imported model.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from silotune.core.serialization import read_metadata, read_tensors, tensor_bytes
from silotune.core.tensors import Tensors
from silotune.errors import InputError

FILE = "start.safetensors"
"""Name of the copy in a run's folder."""

_METADATA = "silotune-start"

START_ALLOWED = "allowed: a folder in peft's layout, a file that `silotune import` wrote, or a finished run"


@dataclass(frozen=True)
class StartAdapter:
    """A LoRA under the backbone's module names, float32.

    Args:
        tensors: `<module>.lora_A.weight` of shape (r, in) and `<module>.lora_B.weight` of shape (out, r).
        r: the rank.
        alpha: the numerator of the scale alpha / r.
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
        """Serialize as a safetensors file."""
        fields = {"tuner": "lora", "r": self.r, "alpha": self.alpha, "sites": list(self.sites)}
        return tensor_bytes(self.tensors, {_METADATA: json.dumps(fields)})

    def matched(self, source: str, r: int, alpha: float, expected: Tensors) -> Tensors:
        """Return the tensors in the order of `expected`, after comparing them with a run's."""
        words = " ".join(self.words[1:])
        if self.r != r:
            raise InputError(f"start: {source} has rank {self.r}, tuner.r is {r}; use {words}")
        if not math.isclose(self.alpha, alpha, rel_tol=1e-6):
            raise InputError(f"start: {source} has alpha {self.alpha:.10g}, tuner.alpha is {alpha}; use {words}")
        for name in [*expected, *self.tensors]:
            if name not in self.tensors or name not in expected:
                here = "a LoRA" if name in self.tensors else "nothing"
                module = name.rpartition(".lora_")[0]
                raise InputError(f"start: {source} has {here} at {module!r}, unlike tuner.sites; use {words}")
            if self.tensors[name].shape != expected[name].shape:
                raise InputError(
                    f"start: {source} has shape {tuple(self.tensors[name].shape)} at {name!r}, this backbone needs "
                    f"{tuple(expected[name].shape)}; it belongs to another base model"
                )
        return {name: self.tensors[name] for name in expected}


def unpack(path: Path) -> StartAdapter:
    """Read a file that `StartAdapter.pack` wrote."""
    try:
        content = path.read_bytes()
        tensors, fields = read_tensors(content), read_metadata(content, _METADATA)
        initial = StartAdapter(tensors, int(fields["r"]), float(fields["alpha"]), tuple(map(str, fields["sites"])))
    except OSError as error:
        raise InputError(f"start: {path} cannot be read ({error.strerror}); {START_ALLOWED}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"start: {path} is not what `silotune import` writes; {START_ALLOWED}") from error
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float32 or not torch.isfinite(tensor).all():
            raise InputError(f"start: {path}: tensor {name!r} is not made of finite float32 numbers")
    return initial
