"""Compute the views of a batch: the backbone's readings of the same rows under several mixes.

A `ViewProgram` is compiled once per phase, prediction or other use: it knows which mixes are equal, which have a
gradient, which stay constant, which can share a forward, and the plans that hold for every batch. Then it is called
for each batch.

Mixes that have gradients go through in one forward over copies of the rows, constant ones in another without gradient,
and activations below the first changed module are computed once for all (`SharedActivations`). Tuners that cannot tell
rows apart on this backbone, or that bring tokens or weights of their own, take one forward for each mix; so do views
with dropout of the backbone, as each draws its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from silotune.config.train import Dropout
from silotune.core.randomness import Stream
from silotune.core.tensors import Tensors
from silotune.data.batching import Batch, MicroBatch
from silotune.data.tasks import Task
from silotune.data.tokenized import HEAD_INPUTS, HOST_INPUTS, Inputs
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan, SharedActivations, repeat_rows
from silotune.models.backbone.padding import Padding
from silotune.models.backbone.segments import Segments, segment_plans
from silotune.models.forward.activation_cache import ActivationCache
from silotune.models.forward.mixing import (
    MixEntry,
    can_share_forward,
    fold_entries,
    group_by_weight,
    has_gradient,
    identity,
    make_plan,
    plan_of_segments,
    select_rows,
)
from silotune.models.forward.untouched_vectors import UntouchedVectors
from silotune.models.forward.views import POOLINGS, ConstantViews, HeadReading, Pooling, View, mean_of_windows

Readings = Callable[[Task], Mapping[str, HeadReading]]
"""A task → head's name → reading, for every head that reads states."""

Encoded = tuple[Tensor, ForwardPlan | None]
"""The last layer's states, shape (rows, tokens, hidden), and their plan; None if rows ran under several plans."""

_Read = tuple[Tensor, Inputs, ForwardPlan]
"""A silo's last states of some rows, shape (rows, tokens, hidden), their inputs and plan, as heads read them."""


@dataclass
class _DistinctView:
    """A view that is computed once, under however many names it was requested.

    Args:
        mixes: per silo, the parts that act.
        trained: whether gradients flow into parts or weights.
        shares: whether its tuners can share a forward with other mixes of the same rows.
        dropout: its dropout of the backbone; None: the tuners decide.
        plan: its plan, where one holds for every batch; None: every call makes its own.
        read_as: the name under which constant views are read; None: it is always computed.
        kept_as: the names under which its readings are kept for later calls.
    """

    mixes: list[list[MixEntry]]
    trained: bool
    shares: bool
    dropout: Dropout
    plan: ForwardPlan | None = None
    read_as: str | None = None
    kept_as: list[str] = field(default_factory=list)


class ViewProgram:
    """Computes the views of a phase or prediction, for the batch of one silo or the batches of a cohort.

    It can be used as long as its mixes keep the same tensor objects; an optimizer may change their values in place.

    Args:
        backbone: runs the forwards.
        mixes: per silo, view's name → mix; all silos have the same names.
        poolings: name → pooling, for every view.
        readings: for a task, how each head reads the last layer's states (see `Readings`).
        dropout: the backbone's dropout in views with gradient: its `own` rates, or one rate; None: the tuners decide.
        constant: names of views that do not change, which `ConstantViews` may cache.
        same: view of an anchor → the view that it equals (`Phase.same_at_start`) and is copied from, without gradient.
        activation_cache: keeps activations below the first part from batch to batch; None: they are computed each time.
        guard: called before every `run`; it stops the work by raising.
        untouched: has the poolings of views without any part; None: they are computed like all others.
    """

    def __init__(
        self,
        backbone: Backbone,
        mixes: Sequence[Mapping[str, Sequence[MixEntry]]],
        poolings: Mapping[str, Pooling] = POOLINGS,
        readings: Readings = lambda task: {},
        dropout: Dropout = None,
        constant: Collection[str] = (),
        same: Mapping[str, str] = {},
        activation_cache: ActivationCache | None = None,
        guard: Callable[[], None] | None = None,
        untouched: UntouchedVectors | None = None,
    ) -> None:
        self.backbone, self.poolings, self.readings, self.same = backbone, poolings, readings, same
        self.untouched = untouched
        self.activation_cache, self._guard = activation_cache, guard
        self._keys = {name: tuple(identity(own[name]) for own in mixes) for name in mixes[0] if name not in same}
        self.distinct: dict[Hashable, _DistinctView] = {}
        for name, key in reversed(self._keys.items()):
            if key not in self.distinct:
                self.distinct[key] = self._compile([own[name] for own in mixes], dropout)
        for name, key in self._keys.items():
            if name in constant:
                self.distinct[key].read_as = name
                self.distinct[key].kept_as = [name]
        for anchor, name in same.items():
            if anchor in constant:
                self.distinct[self._keys[name]].kept_as.append(anchor)

    @property
    def trained(self) -> list[str]:
        """Names of the views into whose parts or weights gradients flow."""
        return [name for name, key in self._keys.items() if self.distinct[key].trained]

    def __call__(self, batch: Batch) -> dict[str, View]:
        """Return one silo's views of a batch by name."""
        return self.run([batch], batch.micro)[0]

    def run(
        self,
        batches: Sequence[Batch],
        micro_batches: Sequence[MicroBatch],
        streams: Sequence[Stream] = (),
        stores: Sequence[ConstantViews] = (),
        trained_alone: bool = False,
    ) -> list[dict[str, View]]:
        """Run the backbone over micro-batches, one by one, and join what it yields to views of whole batches.

        A loss then sees the whole batch while little padding is computed. Gradients flow into the mixes' tensors that
        require them.

        Args:
            batches: one per silo.
            micro_batches: rows of these batches; a view holds the rows that are in them.
            streams: per silo, the random numbers for tuners that draw (see `Segments`); empty for a single silo.
            stores: per silo, the constant views of earlier calls, which are read and added to; empty: all are computed.
            trained_alone: compute only the views into which gradients flow (`trained`).

        Returns:
            Per silo, its views by name. Names with equal mixes in every silo share one view.
        """
        if self._guard is not None:
            self._guard()
        names = self.trained if trained_alone else list(self._keys)
        run = _ProgramRun(self, {self._keys[name] for name in names}, batches, streams, stores)
        for micro_batch in micro_batches:
            run.add(micro_batch)
        views_of_silos = run.views()
        views = [{name: own[self._keys[name]] for name in names} for own in views_of_silos]
        for own in [] if trained_alone else views:
            own |= {anchor: own[name].constant() for anchor, name in self.same.items()}
        return views

    def _compile(self, mixes: Sequence[Sequence[MixEntry]], dropout: Dropout) -> _DistinctView:
        backbone = self.backbone
        acting = [[part for part in mix if part.present] for mix in mixes]
        trained = any(map(has_gradient, acting))
        shares = all(can_share_forward(backbone, part.tuner) for mix in acting for part in mix)
        view = _DistinctView(
            acting,
            trained,
            shares and backbone.known_architecture is not None,
            dropout if dropout is None or trained else 0.0,
        )
        parts = acting[0] if len(acting) == 1 and not backbone.block_devices.several else None
        if view.shares and parts is not None and all(part.tuner.plan_holds and not part.by_row for part in parts):
            with torch.enable_grad():  # the plan reads tensors when it runs
                view.plan = make_plan(backbone, parts).with_dropout(view.dropout)
        return view


class _ProgramRun:
    """One call of a program: the distinct views of some keys, which grow by one micro-batch at a time.

    The other arguments are those of `ViewProgram.run`.
    """

    def __init__(
        self,
        program: ViewProgram,
        keys: Collection[Hashable],
        batches: Sequence[Batch],
        streams: Sequence[Stream],
        stores: Sequence[ConstantViews],
    ) -> None:
        self._program, self._backbone = program, program.backbone
        self._batches, self._streams = batches, streams
        self._readings = [program.readings(batch.task) for batch in batches]
        self._stores = [] if any(self._readings) else stores  # they do not hold the states that heads read
        self._distinct = {key: view for key, view in program.distinct.items() if key in keys}
        self._mixes = {
            key: view.mixes if view.plan else [fold_entries(self._backbone, mix) for mix in view.mixes]
            for key, view in self._distinct.items()
        }
        self._stacks: dict[tuple[int, ...], Tensors] = {}
        self._outputs: dict[Hashable, list[list[tuple[Mapping[str, Tensor], _Read | None]]]] = {
            key: [[] for _ in batches] for key in self._distinct
        }
        """Key → per silo, for each micro-batch with its rows, its poolings and what heads read."""

    def add(self, rows: MicroBatch) -> None:
        """Compute the views of some rows."""
        pending = [key for key, view in self._distinct.items() if not self._take_kept(key, view, rows)]
        padding = Padding.of(rows.inputs, rows.masked)  # here, where no device has to be asked
        device = self._backbone.device
        text = {name: tensor.to(device) for name, tensor in rows.inputs.items() if name not in HEAD_INPUTS}
        for key, encoded in self._encode(pending, rows, text, padding).items():
            self._collect(key, rows, text, encoded)

    def views(self) -> list[dict[Hashable, View]]:
        """Return each silo's views of all rows by key."""

        def view(key: Hashable, silo: int) -> View:
            readings = self._outputs[key][silo]

            def reading(read: HeadReading) -> Callable[[], Tensor]:
                return lambda: torch.cat([read(*states) for _, states in readings if states is not None])

            names = readings[0][0] if readings else ()
            pooled = {name: torch.cat([poolings[name] for poolings, _ in readings]) for name in names}
            return View(pooled, {name: reading(read) for name, read in self._readings[silo].items()})

        return [{key: view(key, silo) for key in self._distinct} for silo in range(len(self._batches))]

    def _take_kept(self, key: Hashable, view: _DistinctView, rows: MicroBatch) -> bool:
        """Take a constant view of some rows from earlier calls; returns whether all rows are kept."""
        if self._take_untouched(key, view, rows):
            return True
        if view.read_as is None or not self._stores:
            return False
        kept_poolings = [
            self._stores[piece.owner].get(view.read_as, self._batches[piece.owner], piece.rows) for piece in rows.pieces
        ]
        if any(poolings is None for poolings in kept_poolings):
            return False
        for piece, poolings in zip(rows.pieces, kept_poolings, strict=True):
            self._outputs[key][piece.owner].append((poolings or {}, None))
        return True

    def _take_untouched(self, key: Hashable, view: _DistinctView, rows: MicroBatch) -> bool:
        """Take a view without any part from the vectors that are kept over rounds; returns whether it is one."""
        store, batches = self._program.untouched, [self._batches[piece.owner] for piece in rows.pieces]
        if store is None or any(view.mixes) or any(self._readings):  # vectors do not hold the states that heads read
            return False
        sources = [batch.source for batch in batches if batch.source is not None]
        if len(sources) < len(batches):
            return False
        for piece, batch, source in zip(rows.pieces, batches, sources, strict=True):
            indices = batch.rows[piece.rows]
            poolings = {name: table[indices.to(table.device)] for name, table in store.of(source).items()}
            self._outputs[key][piece.owner].append((poolings, None))
        return True

    def _encode(
        self, keys: Sequence[Hashable], rows: MicroBatch, text: Inputs, padding: Padding | None
    ) -> dict[Hashable, Encoded]:
        """Run the backbone over some rows under several views."""
        streams = [self._streams[piece.owner] for piece in rows.pieces] if self._streams else []
        segments = Segments(rows.sizes, [piece.width for piece in rows.pieces], streams, self._stacks)
        encoded: dict[Hashable, Encoded] = {}
        trained: dict[Hashable, ForwardPlan] = {}
        constant: dict[Hashable, ForwardPlan] = {}
        for key in keys:
            view = self._distinct[key]
            plan = view.plan
            if plan is None:
                mixes = [select_rows(self._mixes[key][piece.owner], piece.places) for piece in rows.pieces]
                groups = group_by_weight(self._backbone, mixes[0], len(rows)) if len(mixes) == 1 else []
                if len(groups) > 1:
                    encoded[key] = _encode_groups(self._backbone, text, groups)
                    continue
                mixes = [mix for _, mix in groups] or mixes
                plan = plan_of_segments(self._backbone, mixes, segments).with_dropout(view.dropout)
            if not (view.shares and plan.by_row):
                if len(rows.pieces) > 1:
                    raise InputError("cohort: silos with such parts cannot share a forward; allowed: cohort=1")
                encoded[key] = self._backbone.encode(text, plan, padding), plan
            elif torch.is_grad_enabled() and view.trained:
                trained[key] = plan
            else:
                constant[key] = plan
        shared = self._shared_activations(rows, text, padding, [*trained.values(), *constant.values()])
        for plans in filter(None, (trained, constant)):
            with torch.set_grad_enabled(torch.is_grad_enabled() and plans is trained):
                copies = self._encode_copies([*plans.values()], len(rows), text, padding, shared)
            encoded |= {key: (own, plan) for (key, plan), own in zip(plans.items(), copies, strict=True)}
        return encoded

    def _encode_copies(
        self,
        plans: Sequence[ForwardPlan],
        rows: int,
        text: Inputs,
        padding: Padding | None,
        shared: SharedActivations | None,
    ) -> Sequence[Tensor]:
        """Run a copy of the rows under each plan, in one forward; returns their states, each (rows, tokens, hidden)."""
        count = len(plans)
        plan = plans[0] if count == 1 else segment_plans(plans, Segments([rows] * count))
        if shared is not None:
            plan = replace(plan, repeats=shared.repeated(count))
        copies = {name: repeat_rows(tensor, count) for name, tensor in text.items()}
        return torch.split(self._backbone.encode(copies, plan, padding), rows)

    def _shared_activations(
        self, rows: MicroBatch, text: Inputs, padding: Padding | None, plans: Sequence[ForwardPlan]
    ) -> SharedActivations | None:
        """Return what forwards over the same rows share, from the cache or computed; None if nothing is shared."""
        cache, sources = self._program.activation_cache, []
        for piece in rows.pieces if cache is not None else ():
            batch = self._batches[piece.owner]
            if batch.source is not None:
                sources.append((batch.source, batch.rows[piece.rows].tolist()))
        cached = cache is not None and len(sources) == len(rows.pieces)
        if not plans or not (cached or len(plans) > 1):
            return None
        shared = self._backbone.shared_activations(plans)
        if cache is not None and cached:
            cache.fill(self._backbone, sources, rows.width, shared, alone=rows.masked)
        else:
            self._backbone.record(text, shared, padding)
        return shared

    def _collect(self, key: Hashable, rows: MicroBatch, text: Inputs, encoded: Encoded) -> None:
        """Pool a view's states of some rows, give each silo its own, and keep constant views for later calls."""
        states, plan = encoded
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        poolings = {name: self._split(pool(states, text), rows) for name, pool in self._program.poolings.items()}
        states_of = self._split(states, rows) if any(self._readings) else []
        if states_of and plan is None:
            raise InputError("mix: a head over the vocabulary needs one mix for all rows where weights are replaced")
        for index, piece in enumerate(rows.pieces):
            own, arguments = {name: mean_of_windows(each[index], piece.inputs) for name, each in poolings.items()}, None
            if states_of and plan is not None:
                inputs = {
                    name: tensor if name in HOST_INPUTS else tensor.to(self._backbone.device)
                    for name, tensor in piece.inputs.items()
                }
                arguments = states_of[index], inputs, plan
            self._outputs[key][piece.owner].append((own, arguments))
            for name in self._distinct[key].kept_as if self._stores else ():
                self._stores[piece.owner].put(name, self._batches[piece.owner], piece.rows, own)

    def _split(self, tensor: Tensor, rows: MicroBatch) -> Sequence[Tensor]:
        """Return each piece's sequences of a tensor of shape (sequences, …)."""
        return [tensor] if len(rows.pieces) == 1 else torch.split(tensor, rows.sizes)


def _encode_groups(backbone: Backbone, text: Inputs, groups: Sequence[tuple[Tensor, list[MixEntry]]]) -> Encoded:
    """Run each group of rows under its mix, in a forward of its own; returns states in the rows' order.

    The plan is that of one group if a head over the vocabulary may read it for all: experts alone are replaced.
    """
    pieces, plans = [], [make_plan(backbone, mix) for _, mix in groups]
    for (rows, _), plan in zip(groups, plans, strict=True):
        inputs = {name: tensor[rows.to(tensor.device)] for name, tensor in text.items()}
        pieces.append(backbone.encode(inputs, plan))
    back = torch.cat([rows for rows, _ in groups]).argsort()
    of_experts = all(plan.weights and plan.weights.keys() <= backbone.experts for plan in plans)
    alike = of_experts and not any(plan.prompts or plan.prefixes for plan in plans)
    return torch.cat(pieces)[back.to(pieces[0].device)], plans[0] if alike else None
