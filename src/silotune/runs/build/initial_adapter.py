"""Keeping the initial adapter of a run in its folder, and reading it back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from silotune.core.files import write_bytes
from silotune.core.tensors import Tensors, digest
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.initial_adapter import FILE, InitialAdapter, _unpack

if TYPE_CHECKING:
    from silotune.models.tuners import Tuner
    from silotune.training.context import TrainingContext


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
        from silotune.models.tuners.peft_import import read_peft_lora

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


def keep_start(run: Path, context: TrainingContext) -> None:
    """Keep a copy of what a run begins as in its folder, so that the folder says all of the run.

    Raises:
        InputError: to resume, where what it began as is not what `start` is now.
    """
    if context.start is None:
        return
    path, tuner = run / FILE, context.method.setting.tuner.options.model_dump()
    if path.exists():
        if digest(_unpack(path).tensors) != digest(context.start):
            raise InputError(f"--resume: {run} began from another LoRA than 'start' names now")
        return
    write_bytes(path, InitialAdapter(context.start, tuner["r"], tuner["alpha"], tuple(tuner["sites"])).pack())
