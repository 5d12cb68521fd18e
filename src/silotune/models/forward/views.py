"""`run_views` answers `ViewRequest`s: batches under several mixes, pooled or read for heads (`View`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from silotune.config.train import Dropout
from silotune.core.randomness import Stream
from silotune.core.tensors import Tensors
from silotune.data.batching import Batch
from silotune.data.cohort_batches import CohortMicroBatch, own_micro_batches
from silotune.data.tokenized import HOST_INPUTS, Inputs
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.padding import Padding
from silotune.models.backbone.segments import Segments
from silotune.models.backbone.shared_activations import SharedActivations
from silotune.models.forward.encoding import Encoded, encode_views
from silotune.models.forward.mixing import MixEntry, fold_entries, has_gradient, identity, select_rows
from silotune.models.forward.pooling import POOLINGS, HeadReading, Pooling
from silotune.models.forward.view_cache import ConstantViewCache

if TYPE_CHECKING:
    from silotune.models.forward.activation_cache import ActivationCache


class View(dict[str, Tensor]):
    """A batch under one mix: name of a pooling or head → tensor of shape (rows, …), at least float32.

    Rows are in the batch's order. A head's tensor is computed when it is first read: scores of words are expensive, and
    some views are never given to a head.

    Args:
        pooled: pooling's name → tensor of shape (rows, hidden).
        deferred: head's name → function that computes its tensor of shape (rows, …).
    """

    def __init__(self, pooled: Mapping[str, Tensor], deferred: Mapping[str, Callable[[], Tensor]] = {}) -> None:
        super().__init__(pooled)
        self._deferred = deferred

    def __missing__(self, name: str) -> Tensor:
        if name not in self._deferred:
            raise KeyError(name)
        self[name] = reading = self._deferred[name]()
        return reading


@dataclass(frozen=True)
class ViewRequest:
    """The views to compute of one batch per silo; the rows of all silos share the same forwards.

    Args:
        batches: one per silo.
        mixes: per silo, view's name → mix; all silos have the same names.
        micro_batches: the rows that go through the backbone at once; together they hold every row of `batches` once.
        poolings: name → pooling, for every view.
        head_readings: per silo, head's name → reading; empty where no head reads states.
        activation_cache: keeps activations below the first part from batch to batch; None: they are computed each time.
        streams: per silo, the random numbers for tuners that draw (see `Segments`); empty where none does.
        view_caches: per silo, the cache of views that stay constant during a phase, read and filled here; empty: none.
        dropout: the backbone's dropout in views with gradient: its `own` rates, or one rate; None: as tuners choose.
    """

    batches: Sequence[Batch]
    mixes: Sequence[Mapping[str, Sequence[MixEntry]]]
    micro_batches: Sequence[CohortMicroBatch]
    poolings: Mapping[str, Pooling] = field(default_factory=lambda: POOLINGS)
    head_readings: Sequence[Mapping[str, HeadReading]] = ()
    activation_cache: ActivationCache | None = None
    streams: Sequence[Stream] = ()
    view_caches: Sequence[ConstantViewCache] = ()
    dropout: Dropout = None

    @classmethod
    def of_batch(
        cls,
        batch: Batch,
        mixes: Mapping[str, Sequence[MixEntry]],
        poolings: Mapping[str, Pooling] = POOLINGS,
        head_readings: Mapping[str, HeadReading] = {},
    ) -> ViewRequest:
        """A request for one silo's batch, in the batch's own micro-batches and without caches."""
        return cls([batch], [mixes], own_micro_batches(batch), poolings, [head_readings])


def run_views(backbone: Backbone, request: ViewRequest) -> list[dict[str, View]]:
    """Run the backbone over batches under several mixes.

    Micro-batches are run one by one and their results concatenated, so that losses see the whole batch while little
    padding is computed. Gradients flow into the tensors of the mixes that require them. Views share what they can (see
    `encode_views`); names whose mixes are equal in every silo share one `View`.

    Returns:
        Per silo, view's name → view.
    """
    keys, distinct = _distinct_views(backbone, request)
    stacks: dict[tuple[int, ...], Tensors] = {}
    for micro_batch in request.micro_batches:
        pending = {key: view for key, view in distinct.items() if not _take_cached(request, micro_batch, view)}
        inputs = micro_batch.model_inputs()
        padding = Padding.of(inputs)  # here, where no device has to be asked
        text = {name: tensor.to(backbone.device) for name, tensor in inputs.items()}
        for key, encoded in _encode(backbone, request, micro_batch, text, padding, pending, stacks).items():
            _collect(backbone, request, micro_batch, text, pending[key], encoded)
    heads = request.head_readings or [{} for _ in request.batches]
    views = {
        key: [silo.concatenate(readings) for silo, readings in zip(view.collected, heads, strict=True)]
        for key, view in distinct.items()
    }
    return [{name: views[key][silo] for name, key in keys.items()} for silo in range(len(request.batches))]


@dataclass
class _Collected:
    """Results of one silo's view, one entry per micro-batch that holds rows of the silo.

    Args:
        pooled: pooling's name → tensors of shape (rows of the micro-batch, hidden).
        for_heads: last layer's states of shape (rows, tokens, hidden), inputs and plan; kept only where heads read.
    """

    pooled: dict[str, list[Tensor]] = field(default_factory=dict)
    for_heads: list[tuple[Tensor, Inputs, ForwardPlan]] = field(default_factory=list)

    def add(self, pooled: Mapping[str, Tensor]) -> None:
        """Append a micro-batch's vectors, each of shape (rows, hidden)."""
        for name, vectors in pooled.items():
            self.pooled.setdefault(name, []).append(vectors)

    def concatenate(self, head_readings: Mapping[str, HeadReading]) -> View:
        """The view over all micro-batches."""

        def deferred(read: HeadReading) -> Callable[[], Tensor]:
            return lambda: torch.cat([read(*micro) for micro in self.for_heads])

        pooled = {name: torch.cat(pieces) for name, pieces in self.pooled.items()}
        return View(pooled, {name: deferred(read) for name, read in head_readings.items()})


@dataclass
class _DistinctView:
    """A view that is computed once, under however many names it was requested.

    Args:
        mixes: each silo's mix, with reparametrized parts.
        cached_as: the view's name in the constant view caches; None if it is not cached.
        dropout: its dropout of the backbone; None: as tuners choose.
        collected: each silo's results so far.
    """

    mixes: list[list[MixEntry]]
    cached_as: str | None = None
    dropout: Dropout = None
    collected: list[_Collected] = field(init=False)

    def __post_init__(self) -> None:
        self.collected = [_Collected() for _ in self.mixes]


def _distinct_views(
    backbone: Backbone, request: ViewRequest
) -> tuple[dict[str, Hashable], dict[Hashable, _DistinctView]]:
    """View's name → key, and key → view; views with equal mixes in every silo have the same key."""
    keys: dict[str, Hashable] = {
        name: tuple(identity(mixes[name]) for mixes in request.mixes) for name in request.mixes[0]
    }
    distinct = {
        key: _DistinctView(
            [fold_entries(backbone, mixes[name]) for mixes in request.mixes], dropout=_dropout(request, name)
        )
        for name, key in reversed(keys.items())
    }
    if request.view_caches and not any(request.head_readings):  # heads read states, which the caches do not hold
        for name, key in keys.items():
            if name in request.view_caches[0].views:
                distinct[key].cached_as = name
    return keys, distinct


def _dropout(request: ViewRequest, name: str) -> Dropout:
    """The dropout of a view: none where no gradient flows."""
    # asked of the leaves: in a pass without graph, what they are folded into requires no gradient
    if request.dropout is None:
        return None
    return request.dropout if any(has_gradient(mixes[name]) for mixes in request.mixes) else 0.0


def _take_cached(request: ViewRequest, micro_batch: CohortMicroBatch, view: _DistinctView) -> bool:
    """Collect a constant view from the caches if they hold all rows of a micro-batch; returns whether they do."""
    if view.cached_as is None:
        return False
    cached = []
    for silo_slice in micro_batch.slices:
        pooled = request.view_caches[silo_slice.batch_index].get(
            view.cached_as, request.batches[silo_slice.batch_index], silo_slice.rows
        )
        if pooled is None:
            return False
        cached.append(pooled)
    for silo_slice, pooled in zip(micro_batch.slices, cached, strict=True):
        view.collected[silo_slice.batch_index].add(pooled)
    return True


def _encode(
    backbone: Backbone,
    request: ViewRequest,
    micro_batch: CohortMicroBatch,
    text: Inputs,
    padding: Padding | None,
    views: Mapping[Hashable, _DistinctView],
    stacks: dict[tuple[int, ...], Tensors],
) -> dict[Hashable, Encoded]:
    """Run the backbone over one micro-batch under all views that are not cached.

    Args:
        backbone: shared by all silos.
        request: the batches, streams and the activation cache.
        micro_batch: rows of one or several silos.
        text: the batch's inputs on the backbone's device, each of shape (rows, tokens).
        padding: where its rows are padded.
        views: key → view.
        stacks: stacked tensors of parts, shared by the micro-batches of a request.
    """
    slices = micro_batch.slices
    streams = [request.streams[silo_slice.batch_index] for silo_slice in slices] if request.streams else []
    segments = Segments(micro_batch.sizes, [silo_slice.width for silo_slice in slices], streams, stacks)
    mixes = {
        key: [select_rows(view.mixes[silo_slice.batch_index], silo_slice.rows) for silo_slice in slices]
        for key, view in views.items()
    }
    filler = _activation_filler(backbone, request, micro_batch)
    dropouts = {key: view.dropout for key, view in views.items()}
    return encode_views(backbone, text, mixes, segments, filler, padding, dropouts)


def _activation_filler(
    backbone: Backbone, request: ViewRequest, micro_batch: CohortMicroBatch
) -> Callable[[SharedActivations], None] | None:
    """A callback that fills in cached activations of a micro-batch's rows; None without cache or rows' source."""
    if request.activation_cache is None:
        return None
    rows = []
    for silo_slice in micro_batch.slices:
        batch = request.batches[silo_slice.batch_index]
        if batch.source is None:
            return None
        rows.append((batch.source, batch.rows[silo_slice.rows].tolist()))
    return partial(request.activation_cache.fill, backbone, rows, micro_batch.width)


def _collect(
    backbone: Backbone,
    request: ViewRequest,
    micro_batch: CohortMicroBatch,
    text: Inputs,
    view: _DistinctView,
    encoded: Encoded,
) -> None:
    """Pool a view's states of one micro-batch, hand each silo its rows, and fill the constant view caches.

    Args:
        backbone: runs heads later, on its device.
        request: poolings, heads and caches.
        micro_batch: rows of one or several silos.
        text: the batch's inputs on the backbone's device, each of shape (rows, tokens).
        view: collects.
        encoded: states of shape (rows, tokens, hidden), and their plan.
    """
    states, plan = encoded
    for_heads = any(request.head_readings)
    if for_heads and plan is None:
        raise InputError("mix: a head over the vocabulary needs one mix for all rows where weights are replaced")
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    sizes = micro_batch.sizes
    pooled = {name: torch.split(pool(states, text), sizes) for name, pool in request.poolings.items()}
    states_of = torch.split(states, sizes) if for_heads else ()
    for position, silo_slice in enumerate(micro_batch.slices):
        collected = view.collected[silo_slice.batch_index]
        slice_pooled = {name: vectors[position] for name, vectors in pooled.items()}
        collected.add(slice_pooled)
        if view.cached_as is not None:
            cache = request.view_caches[silo_slice.batch_index]
            cache.put(view.cached_as, request.batches[silo_slice.batch_index], silo_slice.rows, slice_pooled)
        if for_heads:
            inputs = {
                name: tensor if name in HOST_INPUTS else tensor.to(backbone.device)
                for name, tensor in silo_slice.inputs.items()
            }
            collected.for_heads.append((states_of[position], inputs, plan or ForwardPlan()))
