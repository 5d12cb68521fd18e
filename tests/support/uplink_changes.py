"""Small updates of tensors of different shapes, and uplink pipelines over them."""

from __future__ import annotations

import numpy as np
import torch

from silotune.communication.uplink import UplinkPipeline, make_pipeline
from silotune.config.uplink import UplinkConfig

SHAPES = {"global/up.weight": (12, 5), "global/down.weight": (5, 12), "global/bias": (7,), "head/scale": ()}


def pipeline(*names: str, seed: int = 1, secret: bytes | None = None, **options: object) -> UplinkPipeline:
    return make_pipeline(UplinkConfig(name=list(names), **options), seed, secret)


def change(seed: int = 0, spread: float = 1.0, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    draws = np.random.default_rng(seed)
    return {name: torch.tensor(spread * draws.normal(size=shape)) for name, shape in shapes.items()}


def zeros(shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def flat(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([tensors[name].double().numpy().ravel() for name in sorted(tensors)])
