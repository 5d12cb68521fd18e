"""Key `start`: `read_start` reads its LoRA; `keep_start` copies it to the run folder, or on resume compares the two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from silotune.core.files import write_bytes
from silotune.core.tensors import Tensors, digest
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners import TUNERS
from silotune.models.tuners.start_adapter import FILE, START_ALLOWED, unpack

if TYPE_CHECKING:
    from silotune.models.tuners import Tuner
    from silotune.training.context import TrainingContext


def read_start(source: str, backbone: Backbone, tuner: Tuner) -> Tensors:
    """Read the tensors with which the adapters of a run start.

    Args:
        source: a folder in peft's layout, or a file that `silotune import` wrote.
        backbone: the run's.
        tuner: the run's; a LoRA of the same rank, scale and modules.
    """
    if not Path(source).exists():
        raise InputError(f"start: {source} cannot be read (No such file or directory); {START_ALLOWED}")
    if not tuner.implements("read_initial"):
        allowed = ", ".join(f"tuner={name}" for name, kind in TUNERS.items() if kind.implements("read_initial"))
        raise InputError(f"start: {source} is a LoRA, the run's tuner is {tuner.name}; allowed: {allowed}")
    return tuner.read_initial(source, backbone)


def keep_start(run: Path, context: TrainingContext) -> None:
    """Copy the initial adapter into the run folder, or on resume check that it is still the same."""
    if context.initial.start is None:
        return
    path = run / FILE
    if path.exists():
        if digest(unpack(path).tensors) != digest(context.initial.start):
            raise InputError(f"--resume: {run} began from another LoRA than 'start' names now")
        return
    write_bytes(path, context.method.setting.tuner.pack_initial(context.initial.start))
