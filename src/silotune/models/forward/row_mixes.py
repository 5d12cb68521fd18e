"""Rows of several models in one forward or one decoding: which mix acts on which rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.segments import Segments
from silotune.models.backbone.virtual_tokens import Prefix, Prompt
from silotune.models.forward.mixing import MixEntry, identity, make_plan, plan_of_segments, select_rows

Mixed = Sequence[MixEntry]


@dataclass(frozen=True)
class RowMixes:
    """The mixes of a batch's rows; the rows of one mix lie next to each other, in the order of the mixes.

    Args:
        mixes: of each segment, the parts that act; a weight may have shape (rows of the segment,).
        sizes: rows of each segment.
    """

    mixes: Sequence[Mixed]
    sizes: Sequence[int]

    def plan(self, backbone: Backbone) -> ForwardPlan:
        """Make the plan of a forward over all rows.

        Mixes of several models need a family in the table of architectures, tuners that mix rows and replace no
        weights, and equally many virtual tokens (`sharing_key`).
        """
        if len(self.mixes) == 1:
            return make_plan(backbone, self.mixes[0])
        acting = [[part for part in mix if not part.tuner.virtual_tokens] for mix in self.mixes]
        plan = plan_of_segments(backbone, acting, Segments([*self.sizes]))
        virtual = [[part for part in mix if part.tuner.virtual_tokens] for mix in self.mixes]
        if any(virtual):
            plans = [make_plan(backbone, mix) for mix in virtual]
            plan = replace(plan, prompts=_join_prompts(plans, self.sizes), prefixes=_join_prefixes(plans, self.sizes))
        return plan

    def select(self, rows: Tensor) -> RowMixes:
        """Return the mixes of some rows, in this order; a row may be named more than once."""
        if len(self.mixes) == 1:
            return RowMixes([select_rows(self.mixes[0], rows)], [len(rows)])
        places = [(segment, row) for segment, size in enumerate(self.sizes) for row in range(size)]
        groups = groupby((places[row] for row in rows.tolist()), itemgetter(0))
        runs = [(key, [row for _, row in group]) for key, group in groups]
        return RowMixes([select_rows(self.mixes[segment], own) for segment, own in runs], [len(own) for _, own in runs])

    @classmethod
    def merged(cls, mixes: Sequence[Mixed], sizes: Sequence[int]) -> tuple[RowMixes, Tensor]:
        """Put rows with equal mixes next to each other.

        Returns:
            The mixes, and the new order of the rows, shape (rows,).
        """
        rows: dict[Hashable, list[int]] = {}
        segments: dict[Hashable, list[Mixed]] = {}
        begin = 0
        for mix, size in zip(mixes, sizes, strict=True):
            key = identity([replace(part, weight=1.0) if part.by_row else part for part in mix])
            rows.setdefault(key, []).extend(range(begin, begin + size))
            segments.setdefault(key, []).append(mix)
            begin += size
        order = [row for same in rows.values() for row in same]
        joint = [_concatenated(same) for same in segments.values()]
        return cls(joint, [len(same) for same in rows.values()]), torch.tensor(order)


def sharing_key(backbone: Backbone, mix: Mixed) -> Hashable:
    """Return a key that is equal for mixes whose rows can share a forward; None for one that shares with no other.

    Weights are of one row, shape (1,), or numbers.
    """
    plan = make_plan(backbone, mix)
    if backbone.known_architecture is None or not all(part.tuner.mixes_rows(backbone) for part in mix):
        return None
    if plan.weights or plan.dropout:
        return None
    prompts = tuple((prompt.tokens, prompt.vectors.dtype) for prompt in plan.prompts)
    return prompts, tuple((prefix.tokens, prefix.decoder) for prefix in plan.prefixes)


def _concatenated(mixes: Sequence[Mixed]) -> Mixed:
    """Return the mix of several batches' rows, whose weights alone may differ."""
    if len(mixes) == 1:
        return mixes[0]
    return [
        replace(first, weight=torch.cat([torch.as_tensor(part.weight) for part in parts])) if first.by_row else first
        for first, *parts in zip(mixes[0], *mixes, strict=True)
    ]


def _present(presence: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Return which of all rows have virtual tokens, shape (rows,); None if all have."""
    if all(present is None for present in presence):
        return None
    device = next(present.device for present in presence if present is not None)
    everywhere = (torch.ones(size, dtype=torch.bool, device=device) for size in sizes)
    return torch.cat([all_rows if own is None else own for own, all_rows in zip(presence, everywhere, strict=True)])


def _expanded(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Concatenate tensors of shape (rows or 1, …) of segments of these sizes."""
    return torch.cat([each.expand(size, *each.shape[1:]) for each, size in zip(tensors, sizes, strict=True)])


def _join_prompts(plans: Sequence[ForwardPlan], sizes: Sequence[int]) -> list[Prompt]:
    """Return prompts for all rows; a segment whose rows have none gets masked ones."""
    joined = []
    for place in range(max(len(plan.prompts) for plan in plans)):
        some = next(plan.prompts[place] for plan in plans if plan.prompts)
        own = [
            plan.prompts[place]
            if plan.prompts
            else Prompt(torch.zeros_like(some.vectors[:1]), _absent(size, some.vectors))
            for plan, size in zip(plans, sizes, strict=True)
        ]
        vectors = _expanded([prompt.vectors for prompt in own], sizes)
        joined.append(Prompt(vectors, _present([prompt.present for prompt in own], sizes)))
    return joined


def _join_prefixes(plans: Sequence[ForwardPlan], sizes: Sequence[int]) -> list[Prefix]:
    """Return prefixes for all rows; a segment whose rows have none gets masked ones."""
    joined = []
    for place in range(max(len(plan.prefixes) for plan in plans)):
        some = next(plan.prefixes[place] for plan in plans if plan.prefixes)
        nothing = [(torch.zeros_like(keys[:1]), torch.zeros_like(values[:1])) for keys, values in some.layers]
        own = [
            plan.prefixes[place] if plan.prefixes else Prefix(nothing, _absent(size, nothing[0][0]), some.decoder)
            for plan, size in zip(plans, sizes, strict=True)
        ]
        layers = [
            (_expanded([keys for keys, _ in pairs], sizes), _expanded([values for _, values in pairs], sizes))
            for pairs in zip(*(prefix.layers for prefix in own), strict=True)
        ]
        joined.append(Prefix(layers, _present([prefix.present for prefix in own], sizes), some.decoder))
    return joined


def _absent(rows: int, like: Tensor) -> Tensor:
    return torch.zeros(rows, dtype=torch.bool, device=like.device)
