"""Mixes: which parts act in a forward, and how much; one weight for all rows of a batch, or one for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from silotune.parts import State, Tensors
from silotune.plan import Plan
from silotune.tuners.base import Tuner, Weight, Weighted

if TYPE_CHECKING:
    from silotune.backbone import Backbone

Learned = Callable[[State], Weight]
"""A weight that is itself learned: read from the silo's state in every step."""
Mix = Mapping[str, Weight | Learned]
"""Part (or anchor) name → weight."""


def settled(mix: Mix, state: State) -> dict[str, Weight]:
    """A mix with its learned weights read from a state; without gradient they are plain numbers."""
    weights: dict[str, Weight] = {}
    for name, weight in mix.items():
        if callable(weight) and not isinstance(weight, Tensor):
            weight = weight(state)
            weight = weight if isinstance(weight, Tensor) and weight.requires_grad else float(weight)
        weights[name] = weight
    return weights


@dataclass(frozen=True)
class Ingredient:
    """One resolved entry of a mix: how the part acts, its tensors, its weight (a number, or one per row)."""

    tuner: Tuner
    tensors: Tensors
    weight: Weight

    @property
    def present(self) -> bool:
        """Whether it acts at all."""
        return isinstance(self.weight, Tensor) or self.weight != 0

    @property
    def by_row(self) -> bool:
        """Whether rows have weights of their own; a learned number of shape () is the same for all."""
        return isinstance(self.weight, Tensor) and self.weight.dim() > 0


def prepared(mix: Sequence[Ingredient]) -> list[Ingredient]:
    """The parts that act, folded: done once, however many forwards follow."""
    return [replace(part, tensors=part.tuner.fold(part.tensors)) for part in mix if part.present]


def of_rows(mix: Sequence[Ingredient], rows: slice | Tensor | Sequence[int]) -> list[Ingredient]:
    """The mix of some rows of a batch, in this order; a row may be named more than once."""
    index = rows if isinstance(rows, slice | Tensor) else torch.tensor(rows)

    def chosen(weight: Tensor) -> Tensor:
        return weight[index.to(weight.device) if isinstance(index, Tensor) else index]

    return [
        replace(part, weight=chosen(part.weight)) if part.by_row and isinstance(part.weight, Tensor) else part
        for part in mix
    ]


def together(backbone: Backbone, mix: Sequence[Ingredient], number: int) -> list[tuple[Tensor, list[Ingredient]]]:
    """Rows that may share a forward, as (their positions, their mix).

    All of them, unless a tuner cannot tell rows apart on this backbone: then those of equal weights.
    """
    apart = [part for part in mix if part.by_row and not part.tuner.mixes_rows(backbone)]
    if not apart:
        return [(torch.arange(number), list(mix))]
    columns = [torch.as_tensor(part.weight, dtype=torch.float64).cpu() for part in apart]
    distinct, group = torch.unique(torch.stack(columns, 1), dim=0, return_inverse=True)
    found = []
    for place, weights in enumerate(distinct.tolist()):
        rows = (group == place).nonzero().flatten()
        fixed = dict(zip(map(id, apart), weights, strict=True))
        own = [replace(part, weight=fixed.get(id(part), part.weight)) for part in mix]
        found.append((rows, of_rows(own, rows)))
    return found


def stacks(backbone: Backbone, tuner: Tuner) -> bool:
    """Whether mixes of this tuner's parts can share a forward over stacked rows (`silotune.stacking`)."""
    return backbone.known is not None and tuner.mixes_rows(backbone) and not tuner.virtual_tokens


def make_plan(backbone: Backbone, mix: Sequence[Ingredient], rows: slice = slice(None)) -> Plan:
    """The plan of a mix for some rows of a batch. A part of weight 0 is absent, exactly."""
    plan = Plan()
    by_tuner: dict[int, tuple[Tuner, list[Weighted]]] = {}
    for part in of_rows(mix, rows):
        if part.present:
            by_tuner.setdefault(id(part.tuner), (part.tuner, []))[1].append(Weighted(part.tensors, part.weight))
    for tuner, weighted in by_tuner.values():
        tuner.act(backbone, weighted, plan)
    return plan
