"""`encode_views`: last states of the same rows under several mixes, in one forward where they can share it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from silotune.config.train import Dropout
from silotune.data.tokenized import Inputs
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.padding import Padding
from silotune.models.backbone.segments import Segments
from silotune.models.backbone.shared_activations import SharedActivations
from silotune.models.backbone.stacking import split_replicas, stack_plans
from silotune.models.forward.mixing import (
    MixEntry,
    can_share_forward,
    group_by_weight,
    has_gradient,
    make_plan,
    plan_of_segments,
)

Key = TypeVar("Key", bound=Hashable)


Encoded = tuple[Tensor, ForwardPlan | None]
"""The last layer's states, shape (rows, tokens, hidden), and their plan; None if rows ran under several plans."""


def encode_views(
    backbone: Backbone,
    inputs: Inputs,
    mixes: Mapping[Key, Sequence[Sequence[MixEntry]]],
    segments: Segments | None = None,
    fill: Callable[[SharedActivations], None] | None = None,
    padding: Padding | None = None,
    dropouts: Mapping[Key, Dropout] = MappingProxyType({}),
) -> dict[Key, Encoded]:
    """Compute the last layer's states of the same rows under several mixes.

    Mixes that have gradients go through in one forward over stacked rows, constant ones in another without gradient,
    and activations below the first changed module are computed once for all (see `backbone.stacking`).
    Tuners that cannot tell rows apart on this backbone, or that bring tokens or weights of their own, take one forward
    for each mix; so do views with dropout of the backbone, as each draws its own.

    Args:
        backbone: runs the forwards.
        inputs: name → tensor, each of shape (rows, tokens).
        mixes: view → one mix per segment. With one segment a weight may be a tensor of shape (rows,).
        segments: which rows are which silo's; None: all rows are one segment.
        fill: puts cached activations into those that the forwards share; None: nothing is cached.
        padding: where the rows are padded; None: the device is asked.
        dropouts: view → the backbone's dropout (see `ForwardPlan.with_dropout`); without an entry, as tuners choose.

    Returns:
        View → states and plan.
    """
    rows = len(inputs["input_ids"])
    segments = segments or Segments([rows])
    encoded: dict[Key, Encoded] = {}
    trained: dict[Key, ForwardPlan] = {}
    constant: dict[Key, ForwardPlan] = {}
    for key, segment_mixes in mixes.items():
        if len(segment_mixes) == 1:
            groups = group_by_weight(backbone, segment_mixes[0], rows)
            if len(groups) > 1:
                encoded[key] = _encode_groups(backbone, inputs, groups), None
                continue
            segment_mixes = [groups[0][1]]
        plan = plan_of_segments(backbone, segment_mixes, segments).with_dropout(dropouts.get(key))
        if not all(_may_share(backbone, mix, plan) for mix in segment_mixes):
            if len(segment_mixes) > 1:
                raise InputError("cohort: silos with such parts cannot share a forward; allowed: cohort=1")
            encoded[key] = backbone.encode(inputs, plan, padding), plan
        elif torch.is_grad_enabled() and any(map(has_gradient, segment_mixes)):
            trained[key] = plan
        else:
            constant[key] = plan
    return encoded | _encode_stacked(backbone, inputs, rows, trained, constant, fill, padding)


def _encode_stacked(
    backbone: Backbone,
    inputs: Inputs,
    rows: int,
    trained: Mapping[Key, ForwardPlan],
    constant: Mapping[Key, ForwardPlan],
    fill: Callable[[SharedActivations], None] | None,
    padding: Padding | None,
) -> dict[Key, Encoded]:
    """Encode plans that may share a forward: one for those with gradient, one for the others.

    Args:
        backbone: runs the forwards.
        inputs: name → tensor, each of shape (rows, tokens).
        rows: number of rows.
        trained: view → plan with gradient.
        constant: view → plan without gradient.
        fill: see `encode_views`.
        padding: see `encode_views`.
    """
    shared = None
    if (trained and constant) or (fill is not None and (trained or constant)):
        shared = backbone.shared_activations([*trained.values(), *constant.values()])
        if fill is not None:
            fill(shared)
    encoded: dict[Key, Encoded] = {}
    for plans in (trained, constant):
        if not plans:
            continue
        (key, plan), *others = plans.items()
        joint = stack_plans(list(plans.values()), rows) if others else plan
        with torch.set_grad_enabled(torch.is_grad_enabled() and plans is trained):
            states = backbone.encode(inputs, replace(joint, shared=shared), padding)
        if not others:
            encoded[key] = states, plan
            continue
        for (key, plan), replica in zip(plans.items(), split_replicas(states, rows, len(plans)), strict=True):
            encoded[key] = replica, plan
    return encoded


def _encode_groups(backbone: Backbone, inputs: Inputs, groups: Sequence[tuple[Tensor, list[MixEntry]]]) -> Tensor:
    """Encode each group of rows under its mix, in a forward of its own.

    Args:
        backbone: runs the forwards.
        inputs: name → tensor, each of shape (rows, tokens).
        groups: (positions of rows, their mix); together the groups hold every row once.

    Returns:
        States of shape (rows, tokens, hidden), in the rows' order.
    """
    pieces = []
    for rows, mix in groups:
        group_inputs = {name: tensor[rows.to(tensor.device)] for name, tensor in inputs.items()}
        pieces.append(backbone.encode(group_inputs, make_plan(backbone, mix)))
    back = torch.cat([rows for rows, _ in groups]).argsort()
    return torch.cat(pieces)[back.to(pieces[0].device)]


def _may_share(backbone: Backbone, mix: Sequence[MixEntry], plan: ForwardPlan) -> bool:
    """Whether a mix can share a forward with other mixes of the same rows."""
    return (
        backbone.known_architecture is not None
        and plan.by_row
        and all(can_share_forward(backbone, part.tuner) for part in mix)
    )
