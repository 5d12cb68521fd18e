"""Keep a silo's optimizer states in its memory between rounds (`train.keep_optimizer`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from silotune.core.tensors import Tensors

KEPT = "optimizer"
"""Prefix of the names under which a silo's memory keeps them: `optimizer/<phase>/<part>/<tensor>/<entry>`."""


def pack(optimizer: torch.optim.Optimizer, phase: str, leaves: Mapping[str, Tensor]) -> Tensors:
    """Return the state of an optimizer as tensors: moments, and numbers of steps.

    Args:
        optimizer: after its last step.
        phase: the phase's name.
        leaves: the silo's tensors that it has updated, by name.
    """
    return {
        f"{KEPT}/{phase}/{name}/{entry}": torch.as_tensor(value).detach().clone()
        for name, leaf in leaves.items()
        if leaf in optimizer.state
        for entry, value in optimizer.state[leaf].items()
        if value is not None
    }


def restore(optimizer: torch.optim.Optimizer, phase: str, leaves: Mapping[str, Tensor], memory: Tensors) -> None:
    """Set the state of a new optimizer to what `pack` returned; arguments as there, of the silo's next round."""
    for name, leaf in leaves.items():
        prefix = f"{KEPT}/{phase}/{name}/"
        entries = {key.removeprefix(prefix): value for key, value in memory.items() if key.startswith(prefix)}
        if entries:
            optimizer.state[leaf] = {entry: _as_it_was(value) for entry, value in entries.items()}


def _as_it_was(value: Tensor) -> Tensor | int:
    """Copy a tensor; Adafactor counts its steps by an integer, all others by a tensor of floating point."""
    return int(value) if value.dtype is torch.int64 else value.clone()
