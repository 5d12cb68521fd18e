"""Add the gradients of a step: by one graph of the whole batch, or `train.tokens_at_once` tokens at a time.

A loss reads the backbone through its views' readings alone: pooled vectors, and what heads read. So a batch that is too
large for one graph takes two passes, as in GradCache (Gao et al. 2021, arXiv:2101.06983). The first runs all rows
without graph. The loss of the whole batch is computed from these readings, and its backward pass gives the gradients of
heads and of the readings. The second pass runs micro-batch by micro-batch with a graph, and takes the readings'
gradients back through the backbone. Dropout draws the same numbers in both. Where a loss is a mean over rows or tokens
(see `silotune.methods.step.mean_over_rows`), one pass is enough: each micro-batch has a loss of its own.

All ways give the same gradients up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from silotune.core.randomness import Stream
from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch, MicroBatch
from silotune.data.tokenized import READ_COUNTS
from silotune.errors import InputError
from silotune.methods.phase import Phase
from silotune.methods.step import LocalTraining, Step, local_training
from silotune.models.forward.view_program import ViewProgram
from silotune.models.forward.views import ConstantViews, View
from silotune.training.context import TrainingContext

Terms = dict[str, Tensor]
"""The loss and its logged terms, shape () each, by name."""


@dataclass(frozen=True)
class SiloStep:
    """What one silo brings to an optimizer step.

    Args:
        batch: its rows.
        state: part → tensors, with gradients where the phase trains the part.
        received: part → tensors as this round's message brought them.
        memory: tensors that the silo keeps between participations.
        constants: its constant views.
        drawn_for: the purpose of its random numbers in this step; see `core.randomness`.
        scaled: scales the loss for the backward pass, in float16.
        training: what `Method.train` shows in the silo's loss.
        apart: collects the terms of the loss that depend on no row; None: they are added to the loss.
    """

    batch: Batch
    state: State
    received: State
    memory: Tensors
    constants: ConstantViews
    drawn_for: tuple[str | int, ...]
    scaled: Callable[[Tensor], Tensor]
    training: LocalTraining
    apart: list[Tensor] | None = None


class StepGradients:
    """The ways to the gradients of a phase's steps."""

    def __init__(self, context: TrainingContext, phase: Phase) -> None:
        self._parts, self._heads, self._recipe = context.parts, context.heads, context.recipe
        self._loss, self._phase = phase.loss, phase.name
        self._by_row = phase.by_row and not any(head.couples_rows for head in self._heads)
        self._bound, self._virtual = context.tokens_at_once, context.virtual_tokens
        self._graphs = phase.views_with_gradient
        self._seed = context.draw_seed

    def add(
        self, program: ViewProgram, members: Sequence[SiloStep], micro_batches: Sequence[MicroBatch]
    ) -> list[Terms]:
        """Add the gradients of each member's loss to the tensors that the phase trains.

        It is done in the cheapest way whose graphs hold no more tokens than allowed.

        Together, the micro-batches hold every row once.

        Returns:
            Per member, its loss (`loss`) and the terms that the loss logs.
        """
        of_a_view = sum(micro_batch.tokens(self._virtual) for micro_batch in micro_batches)
        if self._bound is None or self._graphs * of_a_view <= self._bound:
            return self.whole_batch(program, members, micro_batches)
        alike = self._recipe.class_weights == "none"  # else the heads' losses are means of rows that differ in weight
        if self._by_row and alike and all(head.loss_units(member.batch) for head in self._heads for member in members):
            return self._one_pass(program, members, micro_batches)
        return self._two_passes(program, members, micro_batches)

    def _loss_of(
        self, member: SiloStep, views: dict[str, View], batch: Batch, whole: Batch | None = None
    ) -> tuple[Tensor, Terms]:
        """Return a member's loss over its batch, or over a piece of a whole one, and the terms that it logs."""
        own, recipe = (member.state, member.received, member.memory, self._parts), self._recipe
        step = Step(batch, views, *own, recipe=recipe, apart=member.apart, whole=whole)
        with local_training(member.training):
            loss = self._loss(step)
        if not isinstance(loss, Tensor) or loss.dim():
            form = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )  # its value may tell of rows
            raise InputError(f"the loss of phase {self._phase!r} returns {form}; allowed: a tensor of shape ()")
        return loss, {"loss": loss.detach(), **step.terms}

    # -- three ways --------------------------------------------------------------------------------------------------

    def whole_batch(
        self, program: ViewProgram, members: Sequence[SiloStep], micro_batches: Sequence[MicroBatch]
    ) -> list[Terms]:
        """Add the gradients by one graph of all rows; arguments as for `add`."""
        draws = _Draws(self._seed, members)
        with draws.of_all:
            views = _run(program, members, micro_batches, draws)
            losses, terms = self._losses(members, views, draws)
        torch.autograd.backward(losses)
        return terms

    def _losses(
        self, members: Sequence[SiloStep], views: Sequence[dict[str, View]], draws: _Draws
    ) -> tuple[list[Tensor], list[Terms]]:
        """Return each member's loss of its whole batch, scaled for the backward pass, and its terms."""
        losses, terms = [], []
        for member, own_views, draw in zip(members, views, draws.of_each, strict=True):
            with draw:
                loss, logged = self._loss_of(member, own_views, member.batch)
            losses.append(member.scaled(loss))
            terms.append(logged)
        return losses, terms

    def _one_pass(
        self, program: ViewProgram, members: Sequence[SiloStep], micro_batches: Sequence[MicroBatch]
    ) -> list[Terms]:
        """Train the micro-batches one after the other, each with its fraction of the loss."""
        draws = _Draws(self._seed, members)
        sums: list[Terms] = [{} for _ in members]
        with draws.of_all:
            for micro_batch in micro_batches:
                views = _run(program, members, [micro_batch], draws)
                losses = []
                for piece in micro_batch.pieces:
                    member, own_sums = members[piece.owner], sums[piece.owner]
                    batch = member.batch.piece(piece)
                    fraction = len(batch) / len(member.batch)
                    loss, terms = self._loss_of(member, views[piece.owner], batch, member.batch)
                    # without a token of response in its rows a piece may have no gradient
                    if loss.requires_grad or all(head.loss_units(batch) for head in self._heads):
                        losses.append(member.scaled(fraction * loss))
                    for name, term in terms.items():
                        own_sums[name] = own_sums[name] + fraction * term if name in own_sums else fraction * term
                if losses:
                    torch.autograd.backward(losses)
        return sums

    def _two_passes(
        self, program: ViewProgram, members: Sequence[SiloStep], micro_batches: Sequence[MicroBatch]
    ) -> list[Terms]:
        """Compute the loss from readings without graph, then take the readings' gradients through the backbone."""
        draws = _Draws(self._seed, members)
        with draws.of_all:
            with torch.no_grad():
                views_of_members = _run(program, members, micro_batches, draws)
            leaves = [_as_leaves(views, program.trained) for views in views_of_members]
            losses, terms = self._losses(members, leaves, draws)
        torch.autograd.backward(losses)
        again = _Draws(self._seed, members)
        flat, counts = {head.name for head in self._heads if head.by_position}, [0] * len(members)
        with again.of_all:
            for micro_batch in micro_batches:
                batches = [member.batch for member in members]
                views = program.run(batches, [micro_batch], again.of_cohort, trained_alone=True)
                _take_back(micro_batch, views, leaves, flat, counts)
        return terms


def _run(
    program: ViewProgram, members: Sequence[SiloStep], micro_batches: Sequence[MicroBatch], draws: _Draws
) -> list[dict[str, View]]:
    """Return each member's views of some micro-batches' rows; constant ones are kept for later passes over the rows."""
    batches, constants = [member.batch for member in members], [member.constants for member in members]
    return program.run(batches, micro_batches, draws.of_cohort, constants)


def _as_leaves(views: Mapping[str, View], names: Sequence[str]) -> dict[str, View]:
    """Return the views, those of these names as leaves; a view of several names stays one."""
    leaves = {id(views[name]): views[name] for name in names}
    copies = {key: view.leaves() for key, view in leaves.items()}
    return {name: copies.get(id(view), view) for name, view in views.items()}


def _take_back(
    micro_batch: MicroBatch,
    views: Sequence[Mapping[str, View]],
    leaves: Sequence[Mapping[str, View]],
    flat: Collection[str],
    counts: list[int],
) -> None:
    """Take the readings' gradients of a micro-batch's rows back through its graph.

    Readings of `flat` heads have a line for each position; `counts` are of those that each silo's earlier rows have.
    """
    outputs: dict[int, Tensor] = {}
    gradients: dict[int, Tensor] = {}
    for piece in micro_batch.pieces:
        start = counts[piece.owner]
        if flat:
            counts[piece.owner] += int(piece.inputs[READ_COUNTS].sum())
        positions = slice(start, counts[piece.owner])
        for name, view in views[piece.owner].items():
            for reading, leaf in leaves[piece.owner][name].items():
                if leaf.grad is not None and view[reading].requires_grad:
                    output = view[reading]  # names with equal mixes have one view
                    own = leaf.grad[positions if reading in flat else piece.rows]
                    outputs[id(output)], gradients[id(output)] = output, own
    if outputs:
        torch.autograd.backward([*outputs.values()], [*gradients.values()])


class _Draws:
    """The state of the random number generator at the start of a step."""

    def __init__(self, seed: int, members: Sequence[SiloStep]) -> None:
        streams = [Stream(seed, *member.drawn_for) for member in members]
        alone = len(members) == 1
        self.of_all: AbstractContextManager[None] = streams[0] if alone else nullcontext()
        """Context of all of the step's work: a silo alone draws from its stream throughout."""
        self.of_cohort: Sequence[Stream] = [] if alone else streams
        """What the forwards of a cohort draw from."""
        self.of_each: Sequence[AbstractContextManager[None]] = [nullcontext()] if alone else streams
        """Context of each member's loss."""
