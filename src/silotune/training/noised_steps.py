"""Take the steps of a phase under DP-SGD: gradients clipped unit by unit, and noise on their sum (Abadi et al. 2016).

A unit is one row, or all rows of one person. The rows drawn for a step train as the members of a cohort do: each has
copies of the trained tensors as leaves of its own, so one forward and one backward pass over all rows give each row's
gradient, of its own mean loss, for every tuner and head. A unit's gradient is the mean of its rows' gradients.

A row's gradient has the same bits whoever shares its group, and so no unit moves another one's: shapes, slots, and
masks follow from the configuration and from how many units were drawn, and a product's numbers from their own row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from silotune.communication.privacy.integer_noise import grid_of, integer_vectors
from silotune.communication.privacy.noise import NoiseStream, with_integer_noise, with_noise
from silotune.core.tensors import State, Tensors, flatten
from silotune.data.batching import Batch, make_batch
from silotune.data.cohort_batches import join
from silotune.errors import InputError
from silotune.methods.parts import Scope
from silotune.methods.phase import Phase
from silotune.methods.step import LocalTraining
from silotune.models.forward.mixing import can_share_forward
from silotune.models.forward.view_program import ViewProgram
from silotune.models.forward.views import ConstantViews
from silotune.training.context import TrainingContext
from silotune.training.phase_batches import drawn_windows, token_limit
from silotune.training.row_privacy import Place, units_of
from silotune.training.silo import Silo
from silotune.training.step_gradients import SiloStep, StepGradients, Terms
from silotune.training.untouched_gradients import UntouchedGradients, gradients_of, reads_vectors_alone

_AT_ONCE = 64
"""Most rows of one graph: each has its own copy of the trained tensors."""

_MOST_NUMBERS = 2**22
"""Numbers of gradients that are rounded at once, which bounds the memory."""

_VECTORS_AT_ONCE = 1024
"""Most rows whose gradients are taken of their vectors at once."""


@dataclass
class NoisedGradient:
    """The noised gradient of one step.

    Args:
        gradient: "part/tensor" → the gradient, as the optimizer takes it; with shared noise of private parts alone.
        terms: mean over the drawn rows of the loss and its terms; without noise, so they stay in the silo.
        rows: number of drawn rows, which also stays in the silo.
        noised_sums: with shared noise the number of units, and "part/tensor" of a shared part → the units' sum plus the
            silo's share, in whole numbers; only its sum with those of other silos may be read.
    """

    gradient: Tensors
    terms: Terms
    rows: int
    noised_sums: tuple[int, Tensors] | None = None


class NoisedSteps:
    """Computes the clipped and noised gradient of each step that a silo takes in one phase.

    The context's `row_privacy` must not be None; the stream has the random numbers of the round `number`, for units and
    noise.
    """

    def __init__(
        self,
        context: TrainingContext,
        silo: Silo,
        phase: Phase,
        stream: NoiseStream,
        training: LocalTraining,
        number: int = 1,
    ) -> None:
        assert context.row_privacy is not None, "callers look"
        self._context, self._silo, self.phase, self._stream, self._training = context, silo, phase, stream, training
        self.count = context.steps(silo, phase)
        self._privacy = context.row_privacy
        self._units = units_of(silo)
        self._rate = context.rate_of_units(silo)
        self._gradients = StepGradients(context, phase)
        self._width, long = context.train.max_length, context.head.long_texts
        self._windows = long.per_row if long.in_windows else 0
        """Windows that every row has, with fillers; 0 where rows are not read in windows."""
        self._rows = drawn_windows(context, silo, silo.name, number, phase.name)
        self._filler = next(unit[0] for unit in self._units if unit)
        self._untouched = (
            UntouchedGradients(context, silo, phase, training) if reads_vectors_alone(context, phase, silo) else None
        )
        self._at_once = self._rows_at_once() if self._untouched is None else _VECTORS_AT_ONCE
        self._copies: list[State] = []
        self._programs: dict[int, ViewProgram] = {}
        self._renewed = phase.renews_mixes

    def step(self, number: int, state: State, received: State, memory: Tensors) -> NoisedGradient:
        """Draw units, and return the noised mean of their clipped gradients.

        No gradients are added to the given parts.
        """
        trained = flatten({name: state[name] for name in self.phase.trains})
        sizes = [tensor.numel() for tensor in trained.values()]
        device = next(iter(trained.values())).device
        home = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        total = torch.zeros(sum(sizes), dtype=torch.int64, device=home)
        beside: list[Tensor] = []
        logged: list[Terms] = []
        clip, deviation = self._privacy.clip, self._privacy.deviation(self._silo.name)
        drawn, grid = list(self._draw(number)), grid_of(clip, deviation)
        # terms of the loss that depend on no row have a gradient in a step without units too, so a filler is trained
        for start in range(0, len(drawn) or 1, self._at_once):
            units = drawn[start : start + self._at_once] or [[]]
            vectors = torch.zeros(len(units), total.numel(), device=total.device)
            turns = max(1, *map(len, units))
            for turn in range(turns):  # a unit keeps its slot: its rows in turn, and then fillers
                places = [unit[turn] if turn < len(unit) else self._filler for unit in units]
                first = start + turn * len(drawn)
                gradients, without_rows, terms = self._row_gradients(number, first, places, state, received, memory)
                flat = torch.cat([each.reshape(len(each), -1) for each in gradients], 1).to(total.device)
                weight = flat.new_tensor([[1 / len(unit) if turn < len(unit) else 0.0] for unit in units])
                vectors = vectors + torch.where(weight > 0, flat * weight, 0.0)
                beside = beside or without_rows
                logged += [each for each, unit in zip(terms, units, strict=True) if turn < len(unit)]
            total += clipped_sum(vectors, clip, grid)
        pieces = {
            name: piece.view(tensor.shape)
            for (name, tensor), piece in zip(trained.items(), torch.split(total, sizes), strict=True)
        }
        extras = dict(zip(trained, beside, strict=True))
        sums = self._noised_sums(number, pieces, extras, grid)
        own = {name: piece for name, piece in pieces.items() if name not in sums}
        noised, expected = self._noised(number, own, deviation, grid), self._rate * len(self._units)
        gradient = {name: (noised[name] / expected).to(trained[name]) + extras[name] for name in own}
        noised_sums = (len(self._units), sums) if sums else None
        return NoisedGradient(gradient, _mean(logged or terms), sum(map(len, drawn)), noised_sums)

    def _noised_sums(self, number: int, total: Tensors, beside: Tensors, grid: float) -> Tensors:
        """Return the sums of shared parts with the silo's share of the noise; none where each silo has its own."""
        noise, parts = self._privacy.shares, self._context.parts
        if noise is None:
            return {}
        shared = {name: each for name, each in total.items() if parts[name.split("/")[0]].scope is Scope.SHARED}
        if any(bool(beside[name].any()) for name in shared):
            raise InputError(
                f"privacy.shares: method {self._context.method.name} has a loss term without rows on shared parts, "
                "which no sum of silos holds; leave it out"
            )
        return with_integer_noise(
            shared, self._stream, noise.silo_deviation, grid, "gaussian", f"{self.phase.name}/{number}/"
        )

    def _noised(self, number: int, total: Tensors, deviation: float, grid: float) -> Tensors:
        return with_noise(total, self._stream, deviation, grid, "gaussian", f"{self.phase.name}/{number}/")

    def _draw(self, number: int) -> Iterator[list[Place]]:
        """Yield each drawn unit's rows, at most `rows_per_unit`: a Poisson sample of units, empty ones included."""
        most, purpose = self._privacy.rows_per_unit, f"{self.phase.name}/{number}"
        mask = self._stream.uniform("units", purpose, (len(self._units),)) < self._rate
        for index in mask.nonzero().flatten().tolist():
            rows = self._units[index]
            if len(rows) > most:
                order = self._stream.uniform("rows", f"{purpose}/{index}", (len(rows),)).argsort()[:most]
                rows = [rows[place] for place in sorted(order.tolist())]
            yield rows

    def _row_gradients(
        self, number: int, first: int, places: Sequence[Place], state: State, received: State, memory: Tensors
    ) -> tuple[list[Tensor], list[Tensor], list[Terms]]:
        """Return each row's own gradients, those of terms without rows, and each row's terms.

        Returns:
            Per trained tensor its gradients, shape (rows, …); per trained tensor the gradient of the terms of the loss
            that depend on no row (`Step.without_rows`); per row its loss and logged terms.
        """
        if self._untouched is not None:
            return self._untouched.of(places, state, received, memory)
        batches = [self._batch(place) for place in places]
        copies = self._copied(state, len(batches))
        without_rows: list[Tensor] = []
        members = [
            SiloStep(
                batch,
                copy,
                received,
                memory,
                ConstantViews(),
                ("private", self._stream.word, self.phase.name, number, first + index),
                lambda loss: loss,
                self._training,
                apart=[] if index else without_rows,
            )
            for index, (batch, copy) in enumerate(zip(batches, copies, strict=True))
        ]
        program = self._program(copies, received, memory)
        joint = [replace(each, masked=True) for each in join(batches, self._context.backbone.pad_id)]
        terms = self._gradients.whole_batch(program, members, joint)
        leaves = [self._leaves(copy) for copy in copies]
        gradients = [
            torch.stack([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in same])
            for same in zip(*leaves, strict=True)
        ]
        return gradients, gradients_of(without_rows, leaves[0]), terms

    def _leaves(self, state: State) -> list[Tensor]:
        return [tensor for name in self.phase.trains for tensor in state[name].values()]

    def _batch(self, place: Place) -> Batch:
        """Return a row alone, padded to a public length, as the others of its group are.

        Nothing is kept of it but, with `cache=frozen-prefix`, what lies below the first adapter, computed of it alone.
        """
        task, row = place
        rows, backbone = self._rows[task], self._context.backbone
        sequences, cost = rows.sequences([row]), backbone.call_cost
        batch = make_batch(rows, sequences, backbone.pad_id, cost, width=self._width, windows=self._windows)
        return batch if self._context.cache is not None else replace(batch, source=None)

    def _rows_at_once(self) -> int:
        """Return the most rows of one graph, which no row changes: one if a tuner cannot separate rows."""
        context = self._context
        if not all(can_share_forward(context.backbone, tuner) for tuner in context.tuners):
            return 1
        limit = token_limit(context, self.phase, [])
        if limit is None:
            return max(1, _AT_ONCE // max(1, self._windows))
        decoder = any(rows.decoder is not None for rows in self._silo.train.values())
        beside = limit.beside + (self._width if decoder else 0)
        return max(1, min(_AT_ONCE, replace(limit, beside=beside).rows(self._width, max(1, self._windows))))

    @torch.no_grad()
    def _copied(self, state: State, count: int) -> list[State]:
        """Return states with leaves of their own for the trained tensors, which have the present values."""
        trained = self.phase.trains
        while len(self._copies) < count:
            own = {name: {key: tensor.clone() for key, tensor in state[name].items()} for name in trained}
            self._copies.append({**state, **own})
            for leaf in self._leaves(self._copies[-1]):
                leaf.requires_grad_()
        for copy in self._copies[:count]:
            leaves = self._leaves(copy)
            torch._foreach_copy_(leaves, self._leaves(state))
            for leaf in leaves:
                leaf.grad = None
            copy.update({name: tensors for name, tensors in state.items() if name not in trained})
        return self._copies[:count]

    def _program(self, copies: Sequence[State], received: State, memory: Tensors) -> ViewProgram:
        """Return the views of so many rows, compiled once where the mixes stay the same tensors."""
        if self._renewed or len(copies) not in self._programs:
            views, resolve = self.phase.views, self._context.resolve
            mixes = [{name: resolve(mix, copy, received, memory) for name, mix in views.items()} for copy in copies]
            self._programs[len(copies)] = self._context.program(mixes, training=True)
        return self._programs[len(copies)]


def clipped_sum(vectors: Tensor, bound: float, grid: float) -> Tensor:
    """Sum units' gradients, shape (units, numbers), each clipped and rounded to whole numbers of `grid`; exact."""
    total = torch.zeros(vectors.shape[1], dtype=torch.int64, device=vectors.device)
    for piece in torch.split(vectors, max(1, _MOST_NUMBERS // vectors.shape[1])):
        total += integer_vectors(piece, bound, grid).sum(0)
    return total


def _mean(logged: Sequence[Terms]) -> Terms:
    return {name: torch.stack([terms[name] for terms in logged]).mean() for name in logged[0]}
