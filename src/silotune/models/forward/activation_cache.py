"""Keep the activations below the first adapter from round to round (`cache=frozen-prefix`).

No part acts there, so a row's activations are the same in every epoch and round. They are computed for fixed groups of
rows: a set's rows, sorted by length, `GROUP` at a time. So they do not depend on when or with which other rows a row
was asked for, and a run that was interrupted, or whose memory was too small for all groups, ends with the same bits.
Under noise on rows each row is a group of its own, as long as itself: no other row may move its bits.
Without the cache a row's activations come from another batch. They are equal in exact arithmetic, and to the bit if the
group is padded and composed as the micro-batch would have been, else up to rounding (the last bits of a matrix product
may depend on its number of rows).

`views.ConstantViews` is another cache on purpose: it keeps one vector per row and pooling, for one phase of one silo.
Under a shared bound, token states would evict these vectors, and computing them again in other micro-batches would
change bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch

from silotune.data.batching import make_inputs
from silotune.data.tokenized import HEAD_INPUTS, Inputs, TokenizedRows
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import SharedActivations, SharedOutput
from silotune.models.backbone.padding import Padding
from silotune.models.forward.mixing import can_share_forward
from silotune.models.tuners.base import Tuner

GROUP = 32
"""Rows that are computed together."""


@dataclass(eq=False)
class _GroupedSet:
    """The division of a set's rows into groups by length; the set is held, so that its id is not used again."""

    source: TokenizedRows
    size: int

    def __post_init__(self) -> None:
        self.order = sorted(range(len(self.source)), key=lambda row: (len(self.source.ids[row]), row))
        self.positions = {row: position for position, row in enumerate(self.order)}


_Group = dict[str, SharedOutput]
"""Module → its output."""


class ActivationCache:
    """Activations below the first part, by set of rows and group; the least recently used group is dropped first.

    Together they have at most `mib` MiB.
    """

    def __init__(self, mib: int) -> None:
        self._limit = mib * 2**20
        self._sets: WeakValueDictionary[tuple[int, int], _GroupedSet] = WeakValueDictionary()
        """Id of a set, rows of a group → the set's groups, as long as any of them is kept."""
        self._groups: OrderedDict[tuple[_GroupedSet, Hashable, Hashable, int], _Group] = OrderedDict()
        """(set, modules with changed inputs, modules with changed outputs, number of the group) → group."""
        self.size = 0
        """Bytes of the kept activations."""
        self.hits = 0
        """Groups that were read from the cache."""
        self.misses = 0
        """Groups that were computed."""

    @classmethod
    def for_tuner(cls, backbone: Backbone, tuner: Tuner, mib: int) -> ActivationCache:
        """Make a cache for parts of this tuner."""
        if not can_share_forward(backbone, tuner) or not backbone.shared_activations([]).modules:
            raise InputError(
                f"cache=frozen-prefix: nothing lies below tuner={tuner.name} on {backbone.model_type} that could be "
                "kept; allowed: cache=none, or tuner=bottleneck, lora, ia3 on an encoder or decoder of a known family"
            )
        return cls(mib)

    @torch.no_grad()
    def fill(
        self,
        backbone: Backbone,
        batch_rows: Sequence[tuple[TokenizedRows, Sequence[int]]],
        width: int,
        shared: SharedActivations,
        alone: bool = False,
    ) -> None:
        """Put a batch's activations into `shared`; compute the groups that are not kept.

        Nothing is done if `shared` has no modules (see `Backbone.shared_activations`).

        Args:
            backbone: computes missing groups.
            batch_rows: sets and rows of them; together the rows of one micro-batch, in order.
            width: tokens of the micro-batch's rows, with padding.
            shared: receives outputs of shape (rows, width, hidden).
            alone: whether each row is computed by itself.
        """
        if not shared.modules:
            return
        rows = [
            row
            for source, indices in batch_rows
            for row in self._rows(backbone, source, indices, shared, 1 if alone else GROUP)
        ]
        for name, sample in rows[0][0].items():
            states = None
            if sample.states is not None:
                states = sample.states.new_zeros(len(rows), width, sample.states.shape[-1])
                for position, (group, index, tokens) in enumerate(rows):
                    states[position, :tokens] = group[name].states[index, :tokens]  # type: ignore[index]  # as in sample
            shared.outputs[name] = replace(sample, states=states)

    def _rows(
        self, backbone: Backbone, source: TokenizedRows, rows: Sequence[int], shared: SharedActivations, size: int
    ) -> list[tuple[_Group, int, int]]:
        """Locate rows of a set: each one's group, its index there, and its number of tokens."""
        key = id(source), size
        self._sets[key] = grouped = self._sets.get(key) or _GroupedSet(source, size)
        locations = [divmod(grouped.positions[row], size) for row in rows]
        numbers = sorted({number for number, _ in locations})
        groups = {number: self._get(backbone, grouped, number, shared) for number in numbers}
        return [
            (groups[number], index, len(source.ids[row])) for row, (number, index) in zip(rows, locations, strict=True)
        ]

    def _get(self, backbone: Backbone, grouped: _GroupedSet, number: int, shared: SharedActivations) -> _Group:
        key = (grouped, shared.changed_inputs, shared.changed_outputs, number)
        if key in self._groups:
            self._groups.move_to_end(key)
            self.hits += 1
            return self._groups[key]
        self.misses += 1
        rows = grouped.order[number * grouped.size : (number + 1) * grouped.size]
        group = _compute_group(backbone, grouped.source, rows, shared)
        self._groups[key] = group
        self.size += _bytes(group)
        while self.size > self._limit and self._groups:
            _, dropped = self._groups.popitem(last=False)
            self.size -= _bytes(dropped)
        return group


def _compute_group(backbone: Backbone, source: TokenizedRows, rows: Sequence[int], shared: SharedActivations) -> _Group:
    """Run one forward over rows of a set, up to the first change."""
    inputs = make_inputs(source, rows, backbone.pad_id)
    text: Inputs = {name: tensor.to(backbone.device) for name, tensor in inputs.items() if name not in HEAD_INPUTS}
    recorded = replace(shared, outputs={})
    backbone.record(text, recorded, Padding.of(inputs))
    return {
        name: replace(output, states=None if output.states is None else output.states.contiguous())
        for name, output in recorded.outputs.items()
    }


def _bytes(group: _Group) -> int:
    return sum(output.states.nbytes for output in group.values() if output.states is not None)
