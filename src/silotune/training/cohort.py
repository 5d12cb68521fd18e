"""`choose` sets the `Cohort` size (`cohort=K|auto`): `auto` goes by device and memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from silotune.errors import InputError
from silotune.models.forward.mixing import can_share_forward
from silotune.training.context import TrainingContext

ON_A_CPU, ON_A_GPU = 8, 32
"""The largest cohort of `cohort=auto`; the second number is chosen, not measured."""

_KEPT = 40
"""Upper bound of the values a block keeps per token for the backward pass, per unit of width (34 in a plain block)."""

_SCORES = 3
"""Values it keeps per pair of tokens and attention head."""

_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The memory limit of a container."""


@dataclass(frozen=True)
class Cohort:
    """The number of silos that train together; `reason` says why `auto` chose no more."""

    size: int = 1
    reason: str = ""


ALONE = Cohort()


def choose(configured: int | str, context: TrainingContext) -> Cohort:
    """Choose the cohort size of a run.

    Args:
        configured: the value of the key `cohort`: a size, or `auto`.
        context: backbone and tuners.

    Raises:
        InputError: for a configured size above 1 if silos cannot share a forward.
    """
    obstacle = _obstacle(context)
    if isinstance(configured, int):
        if configured > 1 and obstacle:
            raise InputError(f"cohort={configured}: {obstacle}; allowed: cohort=1 or auto")
        return Cohort(configured)
    return Cohort(1, obstacle) if obstacle else _fitting(context)


def memory_of(device: torch.device) -> int:
    """Return a device's total memory in bytes; free memory could differ on resume, and lead to other bits."""
    if device.type == "cpu":
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else "max"
        return min(machine, int(limit)) if limit.isdecimal() else machine
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return int(torch.cuda.get_device_properties(device).total_memory)


def _fitting(context: TrainingContext) -> Cohort:
    """Return the largest cohort whose activations of full-length rows fit into half the memory."""
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
    """Return why silos cannot share a forward; empty if they can."""
    backbone = context.backbone
    if context.train.dropout:
        return "silos cannot share a forward with train.dropout, which every silo draws for itself"
    for tuner in context.tuners:
        if not can_share_forward(backbone, tuner):
            return (
                f"silos cannot share a forward with tuner={tuner.name} on {backbone.model_type} (where a tuner only "
                "changes what layers take and give, row by row, they can)"
            )
        if tuner.draws and backbone.base.config.is_encoder_decoder:
            return f"silos cannot share a forward of an encoder–decoder with dropout in tuner={tuner.name}"
    return ""
