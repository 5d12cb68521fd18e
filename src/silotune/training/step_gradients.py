"""`add_gradients` of one step: by one graph of the whole batch, or `train.tokens_at_once` tokens at a time.

A loss reads the backbone through its views' readings alone: pooled vectors, and what heads read. So a batch that is too
large for one graph takes two passes, as in GradCache (Gao et al. 2021, arXiv:2101.06983). The first runs all rows
without graph. The loss of the whole batch is computed from these readings, and its backward pass gives the gradients of
heads and of the readings. The second pass runs micro-batch by micro-batch with a graph, and takes the readings'
gradients back through the backbone. Dropout draws the same numbers in both. Where a loss is a mean over rows or tokens
(see `silotune.methods.step.mean_over_rows`), one pass is enough: each micro-batch has a loss of its own.

All ways give the same gradients up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from silotune.core.randomness import Stream
from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch
from silotune.data.cohort_batches import CohortMicroBatch
from silotune.methods.base import LocalTraining, local_training
from silotune.methods.phase import Phase
from silotune.methods.step import Step
from silotune.models.forward.mixing import MixEntry, has_gradient
from silotune.models.forward.view_cache import ConstantViewCache
from silotune.models.forward.views import View
from silotune.training.context import TrainingContext
from silotune.training.view_copies import ConstantView, as_leaves

Terms = dict[str, Tensor]
"""The loss and its logged terms, shape () each, by name."""


@dataclass(frozen=True)
class SiloStep:
    """One silo's part of an optimizer step.

    Args:
        batch: its rows.
        state: part → tensors, with gradients where the phase trains the part.
        received: part → tensors as this round's message brought them.
        memory: tensors that the silo keeps between participations.
        mixes: view → mix.
        view_cache: its constant views.
        drawn_for: the purpose of its random numbers in this step; see `core.randomness`.
        scaled: scales the loss for the backward pass, in float16.
        training: what `Method.train` shows in the silo's loss.
        same: anchor's view → the view that it equals in this step; see `Phase.same_at_start`.
    """

    batch: Batch
    state: State
    received: State
    memory: Tensors
    mixes: Mapping[str, Sequence[MixEntry]]
    view_cache: ConstantViewCache
    drawn_for: tuple[str | int, ...]
    scaled: Callable[[Tensor], Tensor]
    training: LocalTraining
    same: Mapping[str, str] = field(default_factory=dict)

    def step(self, context: TrainingContext, views: dict[str, View], batch: Batch | None = None) -> Step:
        """Return the arguments of a loss over the batch, or over a piece of it."""
        parts, recipe, batch = context.parts, context.recipe, batch or self.batch
        return Step(batch, views, self.state, self.received, self.memory, parts, recipe=recipe)

    def loss(self, phase: Phase, step: Step) -> Tensor:
        """Return the phase's loss of the silo."""
        with local_training(self.training):
            return phase.loss(step)


def add_gradients(
    context: TrainingContext, phase: Phase, members: Sequence[SiloStep], micro_batches: Sequence[CohortMicroBatch]
) -> list[Terms]:
    """Add the gradients of each member's loss to the tensors that the phase trains.

    Args:
        context: backbone, method and settings.
        phase: its views and its loss.
        members: the silos that train together.
        micro_batches: how their rows go through the backbone; together they hold every row once.

    Returns:
        Per member, its loss (`loss`) and the terms that the loss logs.
    """
    return _StepGradients(context, phase, members, micro_batches).add()


@dataclass(frozen=True)
class _StepGradients:
    """One step's gradients; see `add_gradients`."""

    context: TrainingContext
    phase: Phase
    members: Sequence[SiloStep]
    micro_batches: Sequence[CohortMicroBatch]

    def add(self) -> list[Terms]:
        """Add the gradients in the cheapest way that holds no more tokens than allowed."""
        bound = self.context.tokens_at_once
        if bound is None or self._held_by_whole_batch <= bound:
            return self._whole_batch()
        units = [self._units(member.batch) for member in self.members]
        if self.phase.by_row and all(units):
            return self._one_pass([number for number in units if number])
        return self._two_passes()

    @property
    def _held_by_whole_batch(self) -> int:
        """The tokens of a graph of all rows, in all views with gradient."""
        virtual = self.context.virtual_tokens
        return self.phase.views_with_gradient * sum(batch.tokens(virtual) for batch in self.micro_batches)

    def _units(self, batch: Batch) -> int | None:
        """The number of terms over which all heads' cross-entropies of a batch are means; None if they are not."""
        if self.context.recipe.class_weights != "none":  # means of rows that differ in weight
            return None
        found = {head.loss_units(batch) for head in self.context.heads}
        return found.pop() if len(found) == 1 else None

    # -- three ways --------------------------------------------------------------------------------------------------

    def _whole_batch(self) -> list[Terms]:
        draws = _Draws(self.context.draw_seed, self.members)
        losses, terms = [], []
        with draws.of_all:
            views = self._views(self.micro_batches, draws)
            for member, own_views, draw in zip(self.members, views, draws.of_each, strict=True):
                with draw:
                    step = member.step(self.context, own_views)
                    loss = member.loss(self.phase, step)
                losses.append(member.scaled(loss))
                terms.append({"loss": loss.detach(), **step.terms})
        torch.autograd.backward(losses)
        return terms

    def _one_pass(self, units: Sequence[int]) -> list[Terms]:
        """Train the micro-batches one after the other, each with its share of the loss.

        Args:
            units: per member, the number of terms over which its batch's loss is a mean.
        """
        draws = _Draws(self.context.draw_seed, self.members)
        sums: list[Terms] = [{} for _ in self.members]
        with draws.of_all:
            for micro_batch in self.micro_batches:
                views = self._views([micro_batch], draws)
                losses = []
                for piece in micro_batch.slices:
                    member = self.members[piece.batch_index]
                    batch = member.batch.piece(piece.rows, piece.inputs)
                    share = (self._units(batch) or 0) / units[piece.batch_index]
                    if not share:  # rows without a token of response
                        continue
                    step = member.step(self.context, views[piece.batch_index], batch)
                    loss = share * member.loss(self.phase, step)
                    losses.append(member.scaled(loss))
                    own_sums = sums[piece.batch_index]
                    terms = {"loss": loss.detach()} | {name: share * term for name, term in step.terms.items()}
                    for name, term in terms.items():
                        own_sums[name] = own_sums[name] + term if name in own_sums else term
                if losses:
                    torch.autograd.backward(losses)
        return sums

    def _two_passes(self) -> list[Terms]:
        """Compute the loss from readings without graph, then take the readings' gradients through the backbone."""
        draws = _Draws(self.context.draw_seed, self.members)
        losses, terms, leaves = [], [], []
        with draws.of_all:
            with torch.no_grad():
                views = self._views(self.micro_batches, draws)
            for member, own_views, draw in zip(self.members, views, draws.of_each, strict=True):
                with draw:
                    leaves.append(as_leaves(own_views, self._views_with_graph))
                    step = member.step(self.context, leaves[-1])
                    loss = member.loss(self.phase, step)
                losses.append(member.scaled(loss))
                terms.append({"loss": loss.detach(), **step.terms})
        torch.autograd.backward(losses)
        again = _Draws(self.context.draw_seed, self.members)
        with again.of_all:
            for micro_batch in self.micro_batches:
                views = self._views([micro_batch], again, self._views_with_graph)
                self._take_back(micro_batch, views, leaves)
        return terms

    def _take_back(
        self,
        micro_batch: CohortMicroBatch,
        views: Sequence[Mapping[str, View]],
        leaves: Sequence[Mapping[str, View]],
    ) -> None:
        """Take the readings' gradients of a micro-batch's rows back through its graph.

        Args:
            micro_batch: rows of one or several silos.
            views: per member, the micro-batch's views with a graph.
            leaves: per member, the whole batch's views as leaves, with gradients.
        """
        outputs: dict[int, Tensor] = {}
        gradients: dict[int, Tensor] = {}
        for piece in micro_batch.slices:
            for name, view in views[piece.batch_index].items():
                for reading, leaf in leaves[piece.batch_index][name].items():
                    if leaf.grad is not None and view[reading].requires_grad:
                        output = view[reading]  # names with equal mixes have one view
                        outputs[id(output)], gradients[id(output)] = output, leaf.grad[piece.rows]
        if outputs:
            torch.autograd.backward([*outputs.values()], [*gradients.values()])

    # -- views -------------------------------------------------------------------------------------------------------

    @property
    def _views_with_graph(self) -> list[str]:
        """Names of the views into whose parts or weights gradients flow."""
        return [name for name in self.phase.views if any(has_gradient(member.mixes[name]) for member in self.members)]

    def _views(
        self, micro_batches: Sequence[CohortMicroBatch], draws: _Draws, names: Sequence[str] | None = None
    ) -> list[dict[str, View]]:
        """Run micro-batches; returns each member's views of their rows by name.

        Args:
            micro_batches: all of the step's, or some.
            draws: where random numbers come from.
            names: the views; None: all of the phase, and constant ones are kept for later passes over the rows.
        """
        same = self.members[0].same if all(member.same for member in self.members) else {}
        caches = [member.view_cache for member in self.members]
        if names is None:
            names = [name for name in self.phase.views if name not in same]
        else:
            same, caches = {}, []
        mixes = [{name: member.mixes[name] for name in names} for member in self.members]
        views = self.context.views(
            [member.batch for member in self.members], micro_batches, mixes, draws.of_cohort, caches, training=True
        )
        for index, own in enumerate(views):
            for anchor, view in same.items():
                own[anchor] = ConstantView(own[view])
                self._keep(anchor, own[anchor], index, micro_batches)
        return views

    def _keep(self, anchor: str, view: View, index: int, micro_batches: Sequence[CohortMicroBatch]) -> None:
        """Keep an anchor's view of a member's rows for later passes, if it is one that stays constant."""
        member, start = self.members[index], 0
        if anchor not in member.view_cache.views:
            return
        for piece in (piece for batch in micro_batches for piece in batch.slices if piece.batch_index == index):
            end = start + piece.rows.stop - piece.rows.start
            poolings = {name: reading[start:end] for name, reading in view.items()}
            member.view_cache.put(anchor, member.batch, piece.rows, poolings)
            start = end


class _Draws:
    """Where a step's random numbers come from, from its first one on.

    Args:
        seed: of the silos' own draws.
        members: the silos that train together.
    """

    def __init__(self, seed: int, members: Sequence[SiloStep]) -> None:
        streams = [Stream(seed, *member.drawn_for) for member in members]
        alone = len(members) == 1
        self.of_all: AbstractContextManager[None] = streams[0] if alone else nullcontext()
        """Context of all of the step's work: a silo alone draws from its stream throughout."""
        self.of_cohort: Sequence[Stream] = [] if alone else streams
        """What the forwards of a cohort draw from."""
        self.of_each: Sequence[AbstractContextManager[None]] = [nullcontext()] if alone else streams
        """Context of each member's loss."""
