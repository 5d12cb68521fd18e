"""A mix of adapters as one adapter: what any of them computes in sum, exactly.

LoRA's and bottleneck's updates add up, so that a mix of two is one of twice the rank or width; (IA)³'s factors, bias
offsets and virtual tokens interpolate; full weights interpolate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from silotune.core.tensors import Tensors, copy
from silotune.models.tuners import Tuner, WeightedTensors
from silotune.models.tuners.full import interpolate

Linear = Literal["lora", "ia3", "bitfit", "full"]
"""The tuners whose effect is one of weights and biases."""


@dataclass(frozen=True)
class MergedAdapter:
    """One adapter: the tuner's tensors, folded, and its options with the rank or width that it has now."""

    tensors: Tensors
    options: dict[str, Any]


def join(tuner: Tuner, mix: Sequence[tuple[Tensors, float]]) -> MergedAdapter:
    """One adapter for a mix.

    Raises:
        InputError: where full weights do not sum to 1.
    """
    options = tuner.options.model_dump(mode="json")
    parts = [(tuner.fold({name: t.detach().cpu().float() for name, t in part.items()}), weight) for part, weight in mix]
    if len(parts) == 1 and parts[0][1] == 1:
        return MergedAdapter(copy(parts[0][0]), options)
    names = parts[0][0]
    if tuner.name == "full":
        return MergedAdapter(copy(interpolate([WeightedTensors(part, weight) for part, weight in parts])), options)
    if tuner.name in ("lora", "bottleneck"):
        wide = {name: _side_by_side(name, parts) for name in names}
        options["r"] = int(options["r"]) * len(parts)
        if tuner.name == "lora":
            options["alpha"] = options["alpha"] * len(parts)  # alpha / r stays
        elif options.get("reduction") is not None:
            options["reduction"] = None
            options["r"] = next(len(t) for name, t in wide.items() if name.endswith(".down.bias"))
        return MergedAdapter(wide, options)
    # A factor of 1 is (IA)³'s neutral one, 0 that of all others.
    rest = 1 - sum(weight for _, weight in parts) if tuner.name == "ia3" else 0.0
    sums = {name: torch.stack([weight * part[name] for part, weight in parts]).sum(0) for name in names}
    return MergedAdapter({name: tensor + rest for name, tensor in sums.items()}, options)


def _side_by_side(name: str, parts: Sequence[tuple[Tensors, float]]) -> torch.Tensor:
    """The way in stacked, the way out side by side and weighted, biases of the way out summed."""
    if name.endswith((".lora_A.weight", ".down.weight", ".down.bias")):
        return torch.cat([part[name] for part, _ in parts])
    if name.endswith((".lora_B.weight", ".up.weight")):
        return torch.cat([weight * part[name] for part, weight in parts], 1)
    return torch.stack([weight * part[name] for part, weight in parts]).sum(0)
