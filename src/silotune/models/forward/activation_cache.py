"""`cache=frozen-prefix`: what the frozen layers below the first part make of a row, kept across epochs and rounds.

Nothing trains there, so a row's states do not change for as long as the run lasts. What is kept of a row does not
depend on when or beside which rows it was asked for: rows of a set are computed in groups that follow from the set
alone (sorted by length, `GROUP` at a time). So a run that was interrupted, or whose memory was too small for all of it,
ends with the same bits. Against a run without the cache a row's states are those of another batch: equal in exact
arithmetic, to the bit where the group is padded and composed as the micro-batch would have been, else to rounding (a
matrix product's last bits may depend on how many rows it has).
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from silotune.data.batching import make_batch
from silotune.data.tokenized import HEAD_INPUTS, TokenizedRows
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.shared_activations import SharedActivations, StopForward
from silotune.models.forward.mixing import can_share_forward
from silotune.models.tuners.base import Tuner

if TYPE_CHECKING:
    from silotune.data.tokenized import Inputs


GROUP = 32
"""Rows that are computed together."""

_ONE_MICRO_BATCH = 2**40


@dataclass
class _Rows:
    """How a set's rows are grouped. Keeps the set, so that its id stays its own."""

    source: TokenizedRows
    order: list[int]
    place: list[int]  # row → its place in the order

    @classmethod
    def of(cls, source: TokenizedRows) -> _Rows:
        order = sorted(range(len(source)), key=lambda row: (len(source.ids[row]), row))
        place = [0] * len(order)
        for position, row in enumerate(order):
            place[row] = position
        return cls(source, order, place)


@dataclass(frozen=True)
class _Kept:
    """A module's output for a group: its states, and the length of the tuple they came in (0: none).

    `dummy`: nobody reads the states, because what the next module makes of them is kept too.
    """

    states: Tensor
    pieces: int
    dummy: bool

    def like(self, states: Tensor) -> object:
        """The output with other rows' states in place."""
        return (states, *([None] * (self.pieces - 1))) if self.pieces else states


_Group = dict[str, _Kept]

Chosen = tuple[TokenizedRows, Sequence[int]]
"""A set, and some of its rows."""


@dataclass(frozen=True)
class _Place:
    """Where what is kept of a row is found: its group, its place there, and how many tokens it has."""

    group: _Group
    place: int
    length: int


class ActivationCache:
    """Keeps outputs below the first part, least recently used first to go.

    Args:
        mib: how much memory they may take, in MiB.
    """

    def __init__(self, mib: int) -> None:
        self._limit = mib * 2**20
        self._sets: dict[int, _Rows] = {}
        self._groups: OrderedDict[tuple[int, Hashable, Hashable, int], _Group] = OrderedDict()
        self._kept: Counter[int] = Counter()
        """How many groups of each set."""
        self.size = 0
        """Bytes that are kept."""
        self.hits = self.misses = 0
        """Groups that were found, and groups that had to be computed."""

    @classmethod
    def over(cls, backbone: Backbone, tuner: Tuner, mib: int) -> ActivationCache:
        """A cache for parts of this tuner.

        Raises:
            InputError: where they change what lies below any block, or the backbone's prefix cannot be kept.
        """
        if not can_share_forward(backbone, tuner) or not backbone.below([]).modules:
            raise InputError(
                f"cache=frozen-prefix: nothing lies below tuner={tuner.name} on {backbone.model_type} that could be "
                "kept; allowed: cache=none, or tuner=bottleneck, lora, ia3 on an encoder or decoder of a known family"
            )
        return cls(mib)

    @torch.no_grad()
    def fill(self, backbone: Backbone, wanted: Sequence[Chosen], width: int, below: SharedActivations) -> None:
        """Put into `below` what its modules give for these rows of these sets, padded to `width` tokens.

        Nothing is put there where the backbone's prefix cannot be kept (`Backbone.below` is empty).
        """
        if not below.modules:
            return
        rows = [place for source, chosen in wanted for place in self._places(backbone, source, chosen, below)]
        for name, sample in rows[0].group.items():
            states = sample.states.new_zeros(len(rows), width, sample.states.shape[-1])
            if not sample.dummy:
                for at, row in enumerate(rows):
                    states[at, : row.length] = row.group[name].states[row.place, : row.length]
            below.found[name] = sample.like(states)
        below.filled = True

    def _places(
        self, backbone: Backbone, source: TokenizedRows, rows: Sequence[int], below: SharedActivations
    ) -> list[_Place]:
        own = self._sets.get(id(source)) or _Rows.of(source)
        wanted = [divmod(own.place[row], GROUP) for row in rows]
        fetched = {number: self._group(backbone, own, number, below) for number in sorted({one for one, _ in wanted})}
        return [
            _Place(fetched[number], place, len(source.ids[row]))
            for row, (number, place) in zip(rows, wanted, strict=True)
        ]

    def _group(self, backbone: Backbone, own: _Rows, number: int, below: SharedActivations) -> _Group:
        key = (id(own.source), below.inputs, below.outputs, number)
        if key in self._groups:
            self._groups.move_to_end(key)
            self.hits += 1
            return self._groups[key]
        self.misses += 1
        group = _computed(backbone, own, own.order[number * GROUP : (number + 1) * GROUP], below)
        self._groups[key] = group
        self._sets[id(own.source)] = own  # as long as any of its groups: an id names no other set meanwhile
        self._kept[id(own.source)] += 1
        self.size += _bytes(group)
        while self.size > self._limit and self._groups:
            (gone, *_), dropped = self._groups.popitem(last=False)
            self.size -= _bytes(dropped)
            self._kept[gone] -= 1
            if not self._kept[gone]:
                del self._sets[gone], self._kept[gone]
        return group


def _computed(backbone: Backbone, own: _Rows, rows: Sequence[int], below: SharedActivations) -> _Group:
    """One forward up to the first change."""
    pad = backbone.pad_id
    (inputs,) = make_batch(own.source, rows, pad, _ONE_MICRO_BATCH).micro
    moved: Inputs = {name: tensor.to(backbone.device) for name, tensor in inputs.items() if name not in HEAD_INPUTS}
    probe = SharedActivations(below.modules, below.inputs, below.outputs, alone=True)
    with contextlib.suppress(StopForward):
        backbone.encode(moved, ForwardPlan(below=probe))
    found = {name: probe.found[name] for name in probe.outermost}
    stack = backbone.architecture
    chain = [name for name in found if name == stack.embeddings or name.removeprefix(f"{stack.blocks}.").isdigit()]
    group = {}
    for name, output in found.items():
        states = output[0] if isinstance(output, tuple) else output
        dummy = name in chain[:-1]  # what the next one makes of it is kept
        kept = states[:0].clone() if dummy else states.contiguous()
        group[name] = _Kept(kept, len(output) if isinstance(output, tuple) else 0, dummy)
    return group


def _bytes(group: _Group) -> int:
    return sum(kept.states.numel() * kept.states.element_size() for kept in group.values())
