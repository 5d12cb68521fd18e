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
from silotune.models.backbone.forward_plan import Plan
from silotune.models.backbone.segments import Segments
from silotune.models.backbone.shared_activations import Below
from silotune.models.backbone.stacking import of_copies, stacked
from silotune.models.forward.mixing import (
    Ingredient,
    make_plan,
    plan_of_segments,
    shares_forward,
    together,
)

if TYPE_CHECKING:
    pass


Key = TypeVar("Key", bound=Hashable)


Encoded = tuple[Tensor, Plan | None]
"""The last layer's states, and the plan they came about under; None where that were several."""


def encode_mixes(
    backbone: Backbone,
    inputs: Inputs,
    mixes: Mapping[Key, Sequence[Ingredient]],
    fill: Callable[[Below], None] | None = None,
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
    mixes: Mapping[Key, Sequence[Sequence[Ingredient]]],
    segments: Segments,
    fill: Callable[[Below], None] | None = None,
) -> dict[Key, Encoded]:
    """As `encode_mixes`, where each segment of the rows has a mix of its own.

    Raises:
        InputError: for several segments with a tuner that cannot tell rows apart.
    """
    rows = segments.rows
    encoded: dict[Key, Encoded] = {}
    trained: dict[Key, Plan] = {}
    constant: dict[Key, Plan] = {}
    for key, own in mixes.items():
        if len(own) == 1:
            groups = together(backbone, own[0], rows)
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
        for (key, plan), piece in zip(plans.items(), of_copies(states, rows, len(plans)), strict=True):
            encoded[key] = piece, plan
    return encoded


def encode_mix(backbone: Backbone, inputs: Inputs, mix: Sequence[Ingredient]) -> Encoded:
    """The last layer's states under a mix whose weights may differ by row; see `encode_mixes`."""
    return encode_mixes(backbone, inputs, {"": mix})[""]


def _encode_groups(backbone: Backbone, inputs: Inputs, groups: Sequence[tuple[Tensor, list[Ingredient]]]) -> Tensor:
    """One forward per distinct mix, rows in their order."""
    pieces = []
    for rows, own in groups:
        some = {name: tensor[rows.to(tensor.device)] for name, tensor in inputs.items()}
        pieces.append(backbone.encode(some, make_plan(backbone, own)))
    back = torch.cat([rows for rows, _ in groups]).argsort()
    return torch.cat(pieces)[back.to(pieces[0].device)]


def _may_share(backbone: Backbone, mix: Sequence[Ingredient], plan: Plan) -> bool:
    """Whether it can share a forward with other mixes of the same rows."""
    return backbone.known is not None and plan.by_row and all(shares_forward(backbone, part.tuner) for part in mix)


def _learns(mix: Sequence[Ingredient]) -> bool:
    """Whether gradients flow into it."""
    tensors = [tensor for part in mix for tensor in (*part.tensors.values(), part.weight) if isinstance(tensor, Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
