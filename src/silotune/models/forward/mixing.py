"""Mixes: which parts act in a forward, and how much; one weight for all rows of a batch, or one for each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from silotune.core.tensors import State, Tensors
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.segments import Segments, segmented
from silotune.models.tuners.base import Tuner, Weight, WeightedTensors

if TYPE_CHECKING:
    from silotune.models.backbone.backbone import Backbone


ANCHORS = ("received", "previous", "frozen")


def received(part: str) -> str:
    """The part as this round's message brought it."""
    return f"received:{part}"


def previous(part: str) -> str:
    """The silo's own part at the end of its last participation."""
    return f"previous:{part}"


def frozen(part: str) -> str:
    """The part as it is now, as a constant: the view sees it, its gradient stops there."""
    return f"frozen:{part}"


def parsed(name: str) -> tuple[str, str]:
    """A name in a mix as (anchor, part); the anchor is empty for a part itself."""
    anchor, _, part = name.rpartition(":")
    return anchor, part


Learned = Callable[[State], Weight]
"""A weight that is itself learned: read from the silo's state in every step."""

Mix = Mapping[str, Weight | Learned]
"""Part (or anchor) name → weight."""


def resolve_weights(mix: Mix, state: State) -> dict[str, Weight]:
    """A mix with its learned weights read from a state; without gradient they are plain numbers."""
    weights: dict[str, Weight] = {}
    for name, weight in mix.items():
        if callable(weight) and not isinstance(weight, Tensor):
            weight = weight(state)
            weight = weight if isinstance(weight, Tensor) and weight.requires_grad else float(weight)
        weights[name] = weight
    return weights


@dataclass(frozen=True)
class MixEntry:
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


def fold_entries(mix: Sequence[MixEntry]) -> list[MixEntry]:
    """The parts that act, folded: done once, however many forwards follow."""
    return [replace(part, tensors=part.tuner.fold(part.tensors)) for part in mix if part.present]


def select_rows(mix: Sequence[MixEntry], rows: slice | Tensor | Sequence[int]) -> list[MixEntry]:
    """The mix of some rows of a batch, in this order; a row may be named more than once."""
    index = rows if isinstance(rows, slice | Tensor) else torch.tensor(rows)

    def chosen(weight: Tensor) -> Tensor:
        return weight[index.to(weight.device) if isinstance(index, Tensor) else index]

    return [
        replace(part, weight=chosen(part.weight)) if part.by_row and isinstance(part.weight, Tensor) else part
        for part in mix
    ]


def group_by_weight(backbone: Backbone, mix: Sequence[MixEntry], number: int) -> list[tuple[Tensor, list[MixEntry]]]:
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
        found.append((rows, select_rows(own, rows)))
    return found


def can_share_forward(backbone: Backbone, tuner: Tuner) -> bool:
    """Whether mixes of this tuner's parts can share a forward over stacked rows (`silotune.stacking`)."""
    return backbone.known is not None and tuner.mixes_rows(backbone) and not tuner.virtual_tokens


def identity(mix: Sequence[MixEntry]) -> Hashable:
    """Equal for mixes of the same tensors with the same weights."""
    return tuple(
        (
            id(part.tuner),
            tuple((name, id(tensor)) for name, tensor in part.tensors.items()),
            id(part.weight) if isinstance(part.weight, Tensor) else part.weight,
        )
        for part in mix
        if part.present
    )


def make_plan(backbone: Backbone, mix: Sequence[MixEntry]) -> ForwardPlan:
    """The plan of a mix. A part of weight 0 is absent, exactly."""
    plan = ForwardPlan()
    for tuner, weighted in _by_tuner(mix):
        tuner.act(backbone, weighted, plan)
    return plan


def plan_of_segments(backbone: Backbone, mixes: Sequence[Sequence[MixEntry]], segments: Segments) -> ForwardPlan:
    """The plan of several silos' mixes, one a segment of the rows.

    Where all are one mix, that mix's. Where they are of one form, tuners may act on all segments at once
    (`Tuner.act_on_segments`); else on one after the other.
    """
    draws = bool(segments.streams) and any(part.tuner.draws for mix in mixes for part in mix)
    by_row = any(part.by_row for mix in mixes for part in mix)
    if len(mixes) == 1 or (not by_row and len({identity(mix) for mix in mixes}) == 1):
        plan = make_plan(backbone, mixes[0])
        return segmented([plan] * len(mixes), segments) if draws else plan
    if not by_row and len({_form(mix) for mix in mixes}) == 1:  # each tensor then has its like in every silo
        plan = ForwardPlan()
        whole = [
            WeightedTensors(segments.stacked([part.tensors for part in parts]), parts[0].weight)
            for parts in zip(*([part for part in mix if part.present] for mix in mixes), strict=True)
        ]
        tuners = {id(part.tuner): part.tuner for part in mixes[0]}
        if len(tuners) == 1 and next(iter(tuners.values())).act_on_segments(backbone, whole, segments, plan):
            return plan
    return segmented([make_plan(backbone, mix) for mix in mixes], segments)


def _form(mix: Sequence[MixEntry]) -> Hashable:
    """Equal for mixes of the same tuners with the same weights, whose tensors have the same names and shapes."""
    return tuple(
        (
            id(part.tuner),
            tuple((name, tensor.shape) for name, tensor in part.tensors.items()),
            id(part.weight) if isinstance(part.weight, Tensor) else part.weight,
        )
        for part in mix
        if part.present
    )


def _by_tuner(mix: Sequence[MixEntry]) -> list[tuple[Tuner, list[WeightedTensors]]]:
    found: dict[int, tuple[Tuner, list[WeightedTensors]]] = {}
    for part in mix:
        if part.present:
            found.setdefault(id(part.tuner), (part.tuner, []))[1].append(WeightedTensors(part.tensors, part.weight))
    return list(found.values())
