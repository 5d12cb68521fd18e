"""Views: one forward of the backbone under a mix of parts, read into one vector per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from silotune.core.randomness import Stream
from silotune.core.tensors import Tensors
from silotune.data.batching import Batch
from silotune.data.cohort_batches import CohortMicroBatch, SiloSlice, own_micro_batches
from silotune.data.tokenized import Inputs
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.segments import Segments
from silotune.models.backbone.shared_activations import SharedActivations
from silotune.models.forward.encoding import encode_together
from silotune.models.forward.mixing import (
    MixEntry,
    fold_entries,
    identity,
    select_rows,
)
from silotune.models.forward.pooling import POOLINGS, HeadReading, Pooling
from silotune.models.forward.view_cache import ConstantViewCache

if TYPE_CHECKING:
    from silotune.models.forward.activation_cache import ActivationCache


class View(dict[str, Tensor]):
    """Reading name → tensor of shape (rows, …), rows in the batch's order, at least float32.

    Heads' readings are made when they are first asked for: scoring words costs, and not every view is given to a head.
    """

    def __init__(self, ready: Mapping[str, Tensor], later: Mapping[str, Callable[[], Tensor]] = {}) -> None:
        super().__init__(ready)
        self._later = later

    def __missing__(self, name: str) -> Tensor:
        if name not in self._later:
            raise KeyError(name)
        self[name] = found = self._later[name]()
        return found


def run_view(
    backbone: Backbone,
    batch: Batch,
    mix: Sequence[MixEntry],
    readings: Mapping[str, Pooling] = POOLINGS,
    head_readings: Mapping[str, HeadReading] = {},
) -> View:
    """Run the backbone over a batch under one mix; see `run_views`."""
    return run_views(backbone, batch, {"": mix}, readings, head_readings)[""]


def run_views(
    backbone: Backbone,
    batch: Batch,
    mixes: Mapping[str, Sequence[MixEntry]],
    readings: Mapping[str, Pooling] = POOLINGS,
    head_readings: Mapping[str, HeadReading] = {},
    cache: ActivationCache | None = None,
) -> dict[str, View]:
    """Run the backbone over a batch under several mixes, by the views' names.

    Micro-batches are run one by one and their readings concatenated, so that losses see the whole batch while little
    padding is paid. Gradients flow into the tensors of the mixes that require them. Views share what they can, see
    `encode_mixes`; equal mixes are one view. `cache` keeps what lies below the first part from batch to batch.
    """
    return run_together(backbone, [batch], own_micro_batches(batch), [mixes], readings, [head_readings], cache)[0]


def run_together(
    backbone: Backbone,
    batches: Sequence[Batch],
    joints: Sequence[CohortMicroBatch],
    mixes: Sequence[Mapping[str, Sequence[MixEntry]]],
    readings: Mapping[str, Pooling] = POOLINGS,
    head_readings: Sequence[Mapping[str, HeadReading]] = (),
    cache: ActivationCache | None = None,
    streams: Sequence[Stream] = (),
    known: Sequence[ConstantViewCache] = (),
) -> list[dict[str, View]]:
    """As `run_views`, for batches of several silos in the same forwards.

    Args:
        backbone: for all.
        batches: one a silo.
        joints: all rows of the batches, as they go through together.
        mixes: each silo's, under the same names. Views that are equal in every silo are one.
        readings: of every view.
        head_readings: each silo's heads'.
        cache: see `run_views`.
        streams: each silo's random numbers, where tuners draw any (`Segments`).
        known: what each silo's constant views are known to say of its rows; filled here.
    """
    names = {name: tuple(identity(own[name]) for own in mixes) for name in mixes[0]}
    folded = {key: [fold_entries(own[name]) for own in mixes] for name, key in reversed(names.items())}
    collected = [{key: _Collected() for key in folded} for _ in batches]
    stacks: dict[tuple[int, ...], Tensors] = {}
    stateless = known and not any(head_readings)  # heads' readings need the backbone's states, which are not kept
    constant = {key: name for name, key in names.items() if stateless and name in known[0].views}
    for joint in joints:
        pieces = joint.pieces
        text = {name: tensor.to(backbone.device) for name, tensor in joint.text().items()}
        own_streams = [streams[piece.member] for piece in pieces] if streams else []
        segments = Segments(joint.sizes, [piece.width for piece in pieces], own_streams, stacks)
        here = {}
        for key, own in folded.items():
            recalled = _recalled(known, constant[key], batches, pieces) if key in constant else None
            if recalled is None:
                here[key] = [select_rows(own[piece.member], piece.rows) for piece in pieces]
            else:
                for piece, found_before in zip(pieces, recalled, strict=True):
                    collected[piece.member][key].add(found_before)
        fill = None if cache is None else _filling(backbone, batches, joint, cache)
        for key, (states, plan) in encode_together(backbone, text, here, segments, fill).items():
            if any(head_readings) and plan is None:
                raise InputError(
                    "mix: a head over the vocabulary needs one mix for all rows where weights are replaced"
                )
            states = states.to(torch.promote_types(states.dtype, torch.float32))
            read = {name: torch.split(reading(states, text), joint.sizes) for name, reading in readings.items()}
            parted = torch.split(states, joint.sizes) if any(head_readings) else ()
            for place, piece in enumerate(pieces):
                found, of_piece = collected[piece.member][key], {name: values[place] for name, values in read.items()}
                found.add(of_piece)
                if key in constant:
                    known[piece.member].put(constant[key], batches[piece.member], piece.rows, of_piece)
                if parted:
                    moved = {name: tensor.to(backbone.device) for name, tensor in piece.inputs.items()}
                    found.kept.append((parted[place], moved, plan or ForwardPlan()))
    views = [
        {key: found.view(head_readings[member] if head_readings else {}) for key, found in own.items()}
        for member, own in enumerate(collected)
    ]
    return [{name: own[key] for name, key in names.items()} for own in views]


def _recalled(
    known: Sequence[ConstantViewCache], view: str, batches: Sequence[Batch], pieces: Sequence[SiloSlice]
) -> list[dict[str, Tensor]] | None:
    """Each piece's readings of a constant view, where all are known."""
    found = [known[piece.member].get(view, batches[piece.member], piece.rows) for piece in pieces]
    there = [readings for readings in found if readings is not None]
    return there if len(there) == len(found) else None


def _filling(
    backbone: Backbone, batches: Sequence[Batch], joint: CohortMicroBatch, cache: ActivationCache
) -> Callable[[SharedActivations], None] | None:
    """What puts in what is known of a joint micro-batch's rows; None where it is not known where they come from."""
    chosen = []
    for piece in joint.pieces:
        batch = batches[piece.member]
        if batch.source is None:
            return None
        chosen.append((batch.source, batch.rows[piece.rows].tolist()))
    return partial(cache.fill, backbone, chosen, joint.width)


@dataclass
class _Collected:
    """What was read of one silo's view, micro-batch by micro-batch; and states, inputs and plan for heads."""

    readings: dict[str, list[Tensor]] = field(default_factory=dict)
    kept: list[tuple[Tensor, Inputs, ForwardPlan]] = field(default_factory=list)

    def add(self, readings: Mapping[str, Tensor]) -> None:
        """A micro-batch's readings."""
        for name, values in readings.items():
            self.readings.setdefault(name, []).append(values)

    def view(self, head_readings: Mapping[str, HeadReading]) -> View:
        """All of them together."""

        def later(read: HeadReading) -> Callable[[], Tensor]:
            return lambda: torch.cat([read(*micro) for micro in self.kept])

        ready = {name: torch.cat(pieces) for name, pieces in self.readings.items()}
        return View(ready, {name: later(read) for name, read in head_readings.items()})
