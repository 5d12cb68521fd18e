"""Encoding: forward passes of the backbone under mixes, shared where their rows allow it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from silotune.data.tokenized import Inputs
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.segments import Segments
from silotune.models.backbone.shared_activations import SharedActivations
from silotune.models.backbone.stacking import split_replicas, stacked
from silotune.models.forward.mixing import (
    MixEntry,
    can_share_forward,
    group_by_weight,
    make_plan,
    plan_of_segments,
)

if TYPE_CHECKING:
    pass


Key = TypeVar("Key", bound=Hashable)


Encoded = tuple[Tensor, ForwardPlan | None]
"""The last layer's states, and the plan they came about under; None where that were several."""


def encode_mixes(
    backbone: Backbone,
    inputs: Inputs,
    mixes: Mapping[Key, Sequence[MixEntry]],
    fill: Callable[[SharedActivations], None] | None = None,
) -> dict[Key, Encoded]:
    """The last layer's states of the same rows under several mixes.

    Mixes that have gradients go through in one forward over stacked rows, constant ones in another without gradient,
    and what lies below the first changed module is computed once for all (`silotune.stacking`). Tuners that cannot tell
    rows apart on this backbone, or that bring tokens or weights of their own, take one forward for each mix. `fill`
    puts in what is known already of what lies below.
    """
    whole = Segments([len(inputs["input_ids"])])
    return encode_together(backbone, inputs, {key: [mix] for key, mix in mixes.items()}, whole, fill)


def encode_together(
    backbone: Backbone,
    inputs: Inputs,
    mixes: Mapping[Key, Sequence[Sequence[MixEntry]]],
    segments: Segments,
    fill: Callable[[SharedActivations], None] | None = None,
) -> dict[Key, Encoded]:
    """As `encode_mixes`, where each segment of the rows has a mix of its own.

    Raises:
        InputError: for several segments with a tuner that cannot tell rows apart.
    """
    rows = segments.rows
    encoded: dict[Key, Encoded] = {}
    trained: dict[Key, ForwardPlan] = {}
    constant: dict[Key, ForwardPlan] = {}
    for key, own in mixes.items():
        if len(own) == 1:
            groups = group_by_weight(backbone, own[0], rows)
            if len(groups) > 1:
                encoded[key] = _encode_groups(backbone, inputs, groups), None
                continue
            own = [groups[0][1]]
        plan = plan_of_segments(backbone, own, segments)
        if not all(_may_share(backbone, mix, plan) for mix in own):
            if len(own) > 1:
                raise InputError("cohort: silos with such parts cannot share a forward; allowed: cohort=1")
            encoded[key] = backbone.encode(inputs, plan), plan
        elif any(map(_learns, own)):
            trained[key] = plan
        else:
            constant[key] = plan
    below = None
    if (trained and constant) or (fill is not None and (trained or constant)):
        below = backbone.below([*trained.values(), *constant.values()])
        if fill is not None:
            fill(below)
    for plans in (trained, constant):
        if not plans:
            continue
        whole = replace(stacked(list(plans.values()), rows), below=below)
        with torch.set_grad_enabled(torch.is_grad_enabled() and plans is trained):
            states = backbone.encode(inputs, whole)
        for (key, plan), piece in zip(plans.items(), split_replicas(states, rows, len(plans)), strict=True):
            encoded[key] = piece, plan
    return encoded


def encode_mix(backbone: Backbone, inputs: Inputs, mix: Sequence[MixEntry]) -> Encoded:
    """The last layer's states under a mix whose weights may differ by row; see `encode_mixes`."""
    return encode_mixes(backbone, inputs, {"": mix})[""]


def _encode_groups(backbone: Backbone, inputs: Inputs, groups: Sequence[tuple[Tensor, list[MixEntry]]]) -> Tensor:
    """One forward per distinct mix, rows in their order."""
    pieces = []
    for rows, own in groups:
        some = {name: tensor[rows.to(tensor.device)] for name, tensor in inputs.items()}
        pieces.append(backbone.encode(some, make_plan(backbone, own)))
    back = torch.cat([rows for rows, _ in groups]).argsort()
    return torch.cat(pieces)[back.to(pieces[0].device)]


def _may_share(backbone: Backbone, mix: Sequence[MixEntry], plan: ForwardPlan) -> bool:
    """Whether it can share a forward with other mixes of the same rows."""
    return backbone.known is not None and plan.by_row and all(can_share_forward(backbone, part.tuner) for part in mix)


def _learns(mix: Sequence[MixEntry]) -> bool:
    """Whether gradients flow into it."""
    tensors = [tensor for part in mix for tensor in (*part.tensors.values(), part.weight) if isinstance(tensor, Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
