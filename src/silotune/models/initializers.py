"""Draw initial values as PyTorch does for a linear layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from silotune.core.tensors import Tensors


def uniform(generator: torch.Generator, bound: float, *shape: int) -> Tensor:
    """Draw a tensor of this shape from the uniform distribution over [-bound, bound)."""
    return (2 * torch.rand(*shape, generator=generator) - 1) * bound


def draw_linear(name: str, rows: int, columns: int, generator: torch.Generator) -> Tensors:
    """Draw a linear layer as PyTorch does, uniform in ±1/√columns.

    Returns:
        `name.weight`, shape (rows, columns), and `name.bias`, shape (rows,).
    """
    bound = 1 / math.sqrt(columns)
    return {
        f"{name}.weight": uniform(generator, bound, rows, columns),
        f"{name}.bias": uniform(generator, bound, rows),
    }
