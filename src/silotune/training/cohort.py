"""Which silos train together (`cohort=K|auto|1`): as many as asked for, or as many as pay and fit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from silotune.errors import InputError
from silotune.models.forward.mixing import can_share_forward
from silotune.training.context import TrainingContext

ON_A_CPU, ON_A_GPU = 8, 32
"""Silos in a cohort with `cohort=auto`, where memory has room for them (the second chosen, not measured)."""

_KEPT = 40
"""Numbers that a block keeps of a token for the way back, per unit of width (from above: 34 in a plain block)."""

_SCORES = 3
"""Numbers that it keeps for each other token and attention head."""

_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Where a container says how much of the machine's memory is its."""


@dataclass(frozen=True)
class Cohort:
    """How many silos train together; `reason`: why no more do, where that was left open."""

    size: int = 1
    reason: str = ""


ALONE = Cohort()


def choose(asked: int | str, context: TrainingContext) -> Cohort:
    """The cohorts of a run: as asked, or with `auto` what pays on the device where the tuners allow it.

    Raises:
        InputError: for several silos, asked for outright, where a forward cannot hold them.
    """
    obstacle = _obstacle(context)
    if isinstance(asked, int):
        if asked > 1 and obstacle:
            raise InputError(f"cohort={asked}: {obstacle}; allowed: cohort=1 or auto")
        return Cohort(asked)
    return Cohort(1, obstacle) if obstacle else _fitting(context)


def memory_of(device: torch.device) -> int:
    """Bytes that a device has in all. What is free now could be another number on resume, and lead to other bits."""
    if device.type == "cpu":
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else "max"
        return min(machine, int(limit)) if limit.isdecimal() else machine
    return int(torch.cuda.get_device_properties(device).total_memory)


def _fitting(context: TrainingContext) -> Cohort:
    """So many silos that half the memory holds what a step keeps of their batches, were all rows of full length."""
    backbone, settings = context.backbone, context.train
    replicas = max(context.replicas(phase) for phase in context.phases)
    number = 4 if backbone.precision == "fp32" else 2  # bytes
    blocks = sum(len(backbone.base.get_submodule(stack.blocks)) for stack in backbone.architecture.stacks)
    scores = _SCORES * int(getattr(backbone.base.config, "num_attention_heads", 0)) * settings.max_length
    of_a_token = replicas * blocks * (backbone.hidden_size * _KEPT + scores) * number
    room = memory_of(backbone.device) // 2 // (settings.batch_size * settings.max_length * of_a_token)
    most = ON_A_CPU if backbone.device.type == "cpu" else ON_A_GPU
    if room < most:
        return Cohort(max(1, room), f"half the memory has room for {room}")
    return Cohort(most)


def _obstacle(context: TrainingContext) -> str:
    backbone = context.backbone
    for tuner in context.tuners:
        if not can_share_forward(backbone, tuner):
            return (
                f"silos cannot share a forward with tuner={tuner.name} on {backbone.model_type} (where a tuner only "
                "changes what layers take and give, row by row, they can)"
            )
        if tuner.draws and backbone.base.config.is_encoder_decoder:
            return f"silos cannot share a forward of an encoder–decoder with dropout in tuner={tuner.name}"
    return ""
