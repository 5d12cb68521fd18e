"""Views: one forward of the backbone under a mix of parts, read into one vector per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from silotune.backbone import Backbone, Inputs, Plan
from silotune.data.batching import Batch
from silotune.parts import Tensors
from silotune.tuners.base import Tuner, Weight, Weighted

Mix = Mapping[str, Weight]
"""Part (or anchor) name → weight."""

Reading = Callable[[Tensor, Inputs], Tensor]
"""(last layer's states (rows, tokens, hidden), inputs) → one tensor whose first dimension is rows."""


def first(states: Tensor, _: Inputs) -> Tensor:
    """The first token's state: [CLS] or <s>."""
    return states[:, 0]


def mean(states: Tensor, inputs: Inputs) -> Tensor:
    """The mean over real tokens."""
    mask = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
    return (states * mask).sum(1) / mask.sum(1)


READINGS: dict[str, Reading] = {"first": first, "mean": mean}


@dataclass(frozen=True)
class Ingredient:
    """One resolved entry of a mix: how the part acts, its tensors, its weight (a number, or one per row)."""

    tuner: Tuner
    tensors: Tensors
    weight: Weight


View = dict[str, Tensor]
"""Reading name → tensor of shape (rows, …), rows in the batch's order, at least float32."""


def run_view(
    backbone: Backbone,
    batch: Batch,
    mix: Sequence[Ingredient],
    readings: Mapping[str, Reading] = READINGS,
) -> View:
    """Run the backbone over a batch under a mix.

    Micro-batches are run one by one and their readings concatenated, so that losses see the whole batch while little
    padding is paid. Gradients flow into the tensors of the mix that require them.
    """
    collected: dict[str, list[Tensor]] = {name: [] for name in readings}
    start = 0
    for inputs in batch.micro:
        rows = len(inputs["input_ids"])
        moved = {name: tensor.to(backbone.device) for name, tensor in inputs.items()}
        states = backbone.encode(moved, make_plan(backbone, mix, slice(start, start + rows)))
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        for name, read in readings.items():
            collected[name].append(read(states, moved))
        start += rows
    return {name: torch.cat(pieces) for name, pieces in collected.items()}


def make_plan(backbone: Backbone, mix: Sequence[Ingredient], rows: slice) -> Plan:
    """The plan of a mix for some rows of a batch. A part of weight 0 is absent, exactly."""
    plan = Plan()
    by_tuner: dict[int, tuple[Tuner, list[Weighted]]] = {}
    for part in mix:
        weight = part.weight[rows] if isinstance(part.weight, Tensor) else part.weight
        if isinstance(weight, Tensor) or weight != 0:
            by_tuner.setdefault(id(part.tuner), (part.tuner, []))[1].append(Weighted(part.tensors, weight))
    for tuner, weighted in by_tuner.values():
        tuner.act(backbone, weighted, plan)
    return plan
