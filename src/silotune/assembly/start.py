"""What a run's adapters begin as: a LoRA from elsewhere instead of a draw (`start=`).

Every adapter of the method begins as this LoRA, private ones too: mixes whose weights sum to 1 then begin as the model
that was imported.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from silotune.backbone import Backbone
from silotune.errors import InputError
from silotune.files import write_bytes
from silotune.parts import Tensors, digest
from silotune.tensor_bytes import read_metadata, read_tensors, tensor_bytes

if TYPE_CHECKING:
    from silotune.training import LocalTraining
    from silotune.tuners import Tuner

FILE = "start.safetensors"
"""The copy that a run keeps in its folder."""
_METADATA = "silotune-start"


@dataclass(frozen=True)
class Start:
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


def read_start(source: str, backbone: Backbone, tuner: Tuner) -> Tensors:
    """What the adapters of a run begin as.

    Args:
        source: a folder in peft's layout, or a file that `silotune import` wrote.
        backbone: the run's.
        tuner: the run's; a LoRA of the same rank, scale and modules.

    Raises:
        InputError: where the two do not fit, with the words to change.
    """
    path = Path(source)
    if tuner.name != "lora":
        raise InputError(f"start: {source} is a LoRA, the run's tuner is {tuner.name}; allowed: tuner=lora")
    if path.is_dir():
        from silotune.interop.peft_lora import read_peft_lora

        start = read_peft_lora(path, backbone)
    else:
        start = _unpack(path)
    options = tuner.options.model_dump()
    words = " ".join(start.words[1:])
    if start.r != options["r"]:
        raise InputError(f"start: {source} has rank {start.r}, tuner.r is {options['r']}; use {words}")
    if not math.isclose(start.alpha, options["alpha"], rel_tol=1e-6):
        raise InputError(
            f"start: {source} has alpha {start.alpha:.10g}, tuner.alpha is {options['alpha']}; use {words}"
        )
    wanted = tuner.init(backbone, [], torch.Generator().manual_seed(0))
    for name in [*wanted, *start.tensors]:
        module = name.rpartition(".lora_")[0]
        if name not in start.tensors:
            raise InputError(f"start: {source} has nothing at {module!r}, which tuner.sites names; use {words}")
        if name not in wanted:
            raise InputError(f"start: {source} has a LoRA at {module!r}, which tuner.sites does not name; use {words}")
        if start.tensors[name].shape != wanted[name].shape:
            raise InputError(
                f"start: {source} has shape {tuple(start.tensors[name].shape)} at {name!r}, this backbone needs "
                f"{tuple(wanted[name].shape)}; it belongs to another base model"
            )
    return {name: start.tensors[name] for name in wanted}


def keep_start(run: Path, training: LocalTraining) -> None:
    """Keep a copy of what a run begins as in its folder, so that the folder says all of the run.

    Raises:
        InputError: to resume, where what it began as is not what `start` is now.
    """
    if training.start is None:
        return
    path, tuner = run / FILE, training.method.setting.tuner.options.model_dump()
    if path.exists():
        if digest(_unpack(path).tensors) != digest(training.start):
            raise InputError(f"--resume: {run} began from another LoRA than 'start' names now")
        return
    write_bytes(path, Start(training.start, tuner["r"], tuner["alpha"], tuple(tuner["sites"])).pack())


def _unpack(path: Path) -> Start:
    try:
        content = path.read_bytes()
        tensors, fields = read_tensors(content), read_metadata(content, _METADATA)
        start = Start(tensors, int(fields["r"]), float(fields["alpha"]), tuple(map(str, fields["sites"])))
    except OSError as error:
        raise InputError(f"start: {path} cannot be read ({error.strerror}); {_ALLOWED}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"start: {path} is not what `silotune import` writes; {_ALLOWED}") from error
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float32 or not torch.isfinite(tensor).all():
            raise InputError(f"start: {path}: tensor {name!r} is not made of finite float32 numbers")
    return start


_ALLOWED = "allowed: a folder in peft's layout, or a file that `silotune import` wrote"
