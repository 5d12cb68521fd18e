"""What new tensors are drawn from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from silotune.core.tensors import Tensors


def uniform(generator: torch.Generator, bound: float, *shape: int) -> Tensor:
    """A draw from ±bound."""
    return (2 * torch.rand(*shape, generator=generator) - 1) * bound


def draw_linear(name: str, rows: int, columns: int, generator: torch.Generator) -> Tensors:
    """A linear layer drawn as PyTorch draws one: weight, shape (rows, columns), and bias uniform in ±1/√columns."""
    bound = 1 / math.sqrt(columns)
    return {
        f"{name}.weight": uniform(generator, bound, rows, columns),
        f"{name}.bias": uniform(generator, bound, rows),
    }
