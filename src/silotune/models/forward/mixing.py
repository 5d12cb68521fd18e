"""The algebra of mixes: which parts, anchors and weights a view is made of, and the plan of a forward under a mix."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from silotune.core.tensors import State, Tensors
from silotune.errors import InputError
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.segments import Segments, segment_plans
from silotune.models.tuners.base import TokenWeight, Tuner, Weight, WeightedTensors

if TYPE_CHECKING:
    from silotune.models.backbone.backbone import Backbone

ANCHORS = ("received", "previous", "frozen")
"""Kinds of constant copies of a part that a mix may name."""


def received(part: str) -> str:
    """Name the part as this round's message brought it."""
    return f"received:{part}"


def previous(part: str) -> str:
    """Name the silo's own part at the end of its last participation."""
    return f"previous:{part}"


def frozen(part: str) -> str:
    """Name the part as it is now, as a constant: no gradient flows into it."""
    return f"frozen:{part}"


def parse_name(name: str) -> tuple[str, str]:
    """Split a name in a mix into (anchor, part); the anchor of a part itself is empty."""
    anchor, _, part = name.rpartition(":")
    return anchor, part


def joined(*parts: str) -> str:
    """Name several parts that together are one adapter, e.g. LoRA's A and B with scopes of their own."""
    return "+".join(parts)


def members(part: str) -> list[str]:
    """Return the parts that a name joins; of a single part, that part."""
    return part.split("+")


def parts_in(names: Iterable[str]) -> list[str]:
    """Return the parts that names in a mix speak of, without anchors, each once, in the order of first mention."""
    return list(dict.fromkeys(part for name in names for part in members(parse_name(name)[1])))


def trained_parts(mix: Iterable[str], trains: Collection[str]) -> set[str]:
    """Return the parts of a mix that train; an anchor's part does not, as it is a constant."""
    return {part for name in mix if ":" not in name for part in members(name)} & {*trains}


def joined_tensors(state: State, part: str) -> Tensors:
    """Return the tensors of a part, or of several that are joined."""
    first, *others = members(part)
    tensors = state[first]
    for other in others:
        tensors = tensors | state[other]
    return tensors


Learned = Callable[[State], Weight | TokenWeight]
"""A learned weight: computed from the silo's state in every step, as one number or as one of each token."""

Mix = Mapping[str, Weight | Learned]
"""Part (or anchor, or `joined` parts) → weight."""


def constant_views(views: Mapping[str, Mix], changes: Collection[str]) -> frozenset[str]:
    """Return the names of the views whose parts and weights stay as they are while a phase changes these parts."""

    def changed(name: str) -> bool:
        anchor, part = parse_name(name)
        return anchor not in ("received", "previous") and not {*members(part)}.isdisjoint(changes)

    return frozenset(
        view
        for view, mix in views.items()
        if not any(map(changed, mix)) and all(isinstance(weight, int | float) for weight in mix.values())
    )


def resolve_weights(mix: Mix, state: State) -> dict[str, Weight | TokenWeight]:
    """Compute a mix's learned weights from a state; a number without gradient becomes a plain one."""
    weights: dict[str, Weight | TokenWeight] = {}
    for name, weight in mix.items():
        if callable(weight) and not isinstance(weight, Tensor):
            learned = weight(state)
            keeps = isinstance(learned, TokenWeight) or (isinstance(learned, Tensor) and learned.requires_grad)
            weights[name] = learned if keeps else float(learned)  # type: ignore[arg-type]
        else:
            weights[name] = weight
    return weights


@dataclass(frozen=True)
class MixEntry:
    """One part of a mix, with everything a forward needs of it.

    Args:
        tuner: how the part acts.
        tensors: the part, by name.
        weight: a number, a tensor of shape () for all rows, or one of shape (rows,).
        tokens: the weight of each token, in place of `weight`.
    """

    tuner: Tuner
    tensors: Tensors
    weight: Weight
    tokens: TokenWeight | None = None

    @property
    def present(self) -> bool:
        """Whether the part acts at all; one of weight 0 is absent, exactly."""
        return isinstance(self.weight, Tensor) or self.weight != 0

    @property
    def by_row(self) -> bool:
        """Whether each row has its own weight; a learned weight of shape () is the same for all."""
        return isinstance(self.weight, Tensor) and self.weight.dim() > 0


def fold_entries(backbone: Backbone, mix: Sequence[MixEntry]) -> list[MixEntry]:
    """Compute the tensors with which parts act (see `Tuner.effective`), once for all forwards under the mix."""
    return [replace(part, tensors=part.tuner.effective(backbone, part.tensors)) for part in mix if part.present]


def select_rows(mix: Sequence[MixEntry], rows: slice | Tensor | Sequence[int]) -> list[MixEntry]:
    """Select the mix of some rows of a batch, in this order.

    Weights may be tensors of shape (rows of the batch,); a row may be named more than once.
    """
    index = rows if isinstance(rows, slice | Tensor) else torch.tensor(rows)

    def select(weight: Tensor) -> Tensor:
        return weight[index.to(weight.device) if isinstance(index, Tensor) else index]

    return [
        replace(part, weight=select(part.weight)) if part.by_row and isinstance(part.weight, Tensor) else part
        for part in mix
    ]


def group_by_weight(backbone: Backbone, mix: Sequence[MixEntry], rows: int) -> list[tuple[Tensor, list[MixEntry]]]:
    """Group rows that can share one forward pass.

    Weights may be tensors of shape (rows,).

    Returns:
        (positions of rows, shape (rows of the group,), their mix) pairs: one for all rows, unless a tuner cannot tell
        rows apart on this backbone; then one for each distinct weight of its parts.
    """
    inseparable = [part for part in mix if part.by_row and not part.tuner.mixes_rows(backbone)]
    if not inseparable:
        return [(torch.arange(rows), list(mix))]
    columns = [torch.as_tensor(part.weight).cpu().double() for part in inseparable]
    distinct, group_of_row = torch.unique(torch.stack(columns, 1), dim=0, return_inverse=True)
    groups = []
    for group, weights in enumerate(distinct.tolist()):
        positions = (group_of_row == group).nonzero().flatten()
        weight_of = dict(zip(map(id, inseparable), weights, strict=True))
        group_mix = [replace(part, weight=weight_of.get(id(part), part.weight)) for part in mix]
        groups.append((positions, select_rows(group_mix, positions)))
    return groups


def can_share_forward(backbone: Backbone, tuner: Tuner) -> bool:
    """Whether mixes of this tuner's parts can share a forward over stacked rows (see `backbone.forward_plan`)."""
    return backbone.known_architecture is not None and tuner.mixes_rows(backbone) and not tuner.virtual_tokens


def has_gradient(mix: Sequence[MixEntry]) -> bool:
    """Whether gradients flow into the mix's tensors or weights."""
    for part in mix:
        tokens = part.tokens.tensors.values() if part.tokens is not None else ()
        tensors = (each for each in (*part.tensors.values(), part.weight, *tokens) if isinstance(each, Tensor))
        if any(tensor.requires_grad for tensor in tensors):
            return True
    return False


def identity(mix: Sequence[MixEntry]) -> Hashable:
    """Return a key that is equal for mixes of the same tensors with the same weights."""
    return _key(mix, id)


def _key(mix: Sequence[MixEntry], of_tensor: Callable[[Tensor], Hashable]) -> Hashable:
    return tuple(
        (
            id(part.tuner),
            tuple((name, of_tensor(tensor)) for name, tensor in part.tensors.items()),
            id(part.weight) if isinstance(part.weight, Tensor) else part.weight,
            None if part.tokens is None else (part.tokens.index, *map(id, part.tokens.tensors.values())),
        )
        for part in mix
        if part.present
    )


def make_plan(backbone: Backbone, mix: Sequence[MixEntry]) -> ForwardPlan:
    """Make the plan of a mix. A part of weight 0 is absent, exactly."""
    plan, beside = ForwardPlan(), backbone.block_devices.beside
    for tuner, weighted in _by_tuner(mix):
        if not tuner.weighs_tokens and any(part.tokens is not None for part in weighted):
            raise InputError(f"mix: tuner={tuner.name} cannot weigh each token; allowed: lora")
        tuner.act(backbone, [replace(part, tensors=beside(part.tensors)) for part in weighted], plan)
    return plan


def plan_of_segments(backbone: Backbone, mixes: Sequence[Sequence[MixEntry]], segments: Segments) -> ForwardPlan:
    """Make one plan of several silos' mixes.

    If all mixes are equal, the plan is that mix's. If they have one form, each tuner may act on all segments at once:
    by tensors that all silos have in common, or in batched products (`Tuner.act_on_segments`). Otherwise the segments'
    plans are applied one after the other.
    """
    draws = bool(segments.streams) and any(part.tuner.draws for mix in mixes for part in mix)
    by_row = any(part.by_row for mix in mixes for part in mix)
    if len(mixes) == 1 or (not by_row and len({identity(mix) for mix in mixes}) == 1):
        plan = make_plan(backbone, mixes[0])
        return segment_plans([plan] * len(mixes), segments) if draws else plan
    # with equal names and shapes each tensor has a counterpart in every silo
    if not by_row and len({_key(mix, lambda tensor: tensor.shape) for mix in mixes}) == 1:
        plan = ForwardPlan()
        by_tuner = [[parts for _, parts in _by_tuner(mix)] for mix in mixes]
        if all(
            _acts_on_segments(backbone, tuner, [parts[index] for parts in by_tuner], segments, plan)
            for index, (tuner, _) in enumerate(_by_tuner(mixes[0]))
        ):
            return plan
    return segment_plans([make_plan(backbone, mix) for mix in mixes], segments)


def _acts_on_segments(
    backbone: Backbone,
    tuner: Tuner,
    mixes: Sequence[Sequence[WeightedTensors]],
    segments: Segments,
    plan: ForwardPlan,
) -> bool:
    """Have one tuner write the effect of its parts, one mix of them per segment; False if it cannot for all at once."""
    beside = backbone.block_devices.beside
    in_common = {tuple(id(tensor) for part in mix for tensor in part.tensors.values()) for mix in mixes}
    if len(in_common) == 1 and not tuner.draws:
        tuner.act(backbone, [replace(part, tensors=beside(part.tensors)) for part in mixes[0]], plan)
        return True
    if not tuner.implements("act_on_segments"):
        return False
    weighted = [
        WeightedTensors(beside(segments.stack_tensors([part.tensors for part in parts])), parts[0].weight)
        for parts in zip(*mixes, strict=True)
    ]
    return tuner.act_on_segments(backbone, weighted, segments, plan)


def _by_tuner(mix: Sequence[MixEntry]) -> list[tuple[Tuner, list[WeightedTensors]]]:
    """Group the acting parts by tuner, in the order of first mention."""
    groups: dict[int, tuple[Tuner, list[WeightedTensors]]] = {}
    for part in mix:
        if part.present:
            weighted = WeightedTensors(part.tensors, part.weight, part.tokens)
            groups.setdefault(id(part.tuner), (part.tuner, []))[1].append(weighted)
    return list(groups.values())
