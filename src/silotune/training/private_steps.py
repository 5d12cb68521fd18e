"""Take the steps of a phase under DP-SGD: gradients clipped unit by unit, and noise on their sum (Abadi et al. 2016).

A unit is one row, or all rows of one person. The rows drawn for a step train as the members of a cohort do: each has
copies of the trained tensors as leaves of its own, so one forward and one backward pass over all rows give each row's
gradient, of its own mean loss, for every tuner and head. A unit's gradient is the mean of its rows' gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from silotune.communication.privacy.noise import NoiseStream, gaussian
from silotune.core.tensors import State, Tensors, flatten
from silotune.data.batching import Batch, MicroBatch, make_batch
from silotune.data.cohort_batches import cut_jointly, join
from silotune.methods.phase import Phase
from silotune.methods.step import LocalTraining
from silotune.models.forward.mixing import can_share_forward
from silotune.models.forward.view_program import ViewProgram
from silotune.models.forward.views import ConstantViews
from silotune.training.context import TrainingContext
from silotune.training.phase_batches import token_limit
from silotune.training.row_privacy import Place, units_of
from silotune.training.silo import Silo
from silotune.training.step_gradients import SiloStep, StepGradients, Terms
from silotune.training.untouched_gradients import UntouchedGradients, gradients_of, reads_vectors_alone

_AT_ONCE = 64
"""Most rows of one graph: each has its own copy of the trained tensors."""

_VECTORS_AT_ONCE = 1024
"""Most rows whose gradients are taken of their vectors at once."""

_LARGEST = 2.0**100
"""Norms from here on count as infinite: factors that scale them down to the least `privacy.clip` would be inexact."""


@dataclass
class PrivateGradient:
    """The noised gradient of one step.

    Args:
        gradient: "part/tensor" → the gradient, as the optimizer takes it.
        terms: mean over the drawn rows of the loss and its terms; without noise, so they stay in the silo.
        rows: number of drawn rows, which also stays in the silo.
    """

    gradient: Tensors
    terms: Terms
    rows: int


class PrivateSteps:
    """Computes the clipped and noised gradient of each step that a silo takes in one phase.

    The context's `row_privacy` must not be None; the stream has the random numbers of this round, for units and noise.
    """

    def __init__(
        self, context: TrainingContext, silo: Silo, phase: Phase, stream: NoiseStream, training: LocalTraining
    ) -> None:
        assert context.row_privacy is not None, "callers look"
        self._context, self._silo, self.phase, self._stream, self._training = context, silo, phase, stream, training
        self.count = context.steps(silo, phase)
        self._privacy = context.row_privacy
        self._units = units_of(silo)
        self._rate = context.rate_of_units(silo)
        self._gradients = StepGradients(context, phase)
        self._untouched = (
            UntouchedGradients(context, silo, phase, training) if reads_vectors_alone(context, phase, silo) else None
        )
        self._at_once = self._rows_at_once() if self._untouched is None else _VECTORS_AT_ONCE
        self._copies: list[State] = []
        self._programs: dict[int, ViewProgram] = {}
        self._renewed = phase.renews_mixes

    def step(self, number: int, state: State, received: State, memory: Tensors) -> PrivateGradient:
        """Draw units, and return the noised mean of their clipped gradients.

        No gradients are added to the given parts.
        """
        trained = flatten({name: state[name] for name in self.phase.trains})
        total = [torch.zeros_like(tensor, requires_grad=False) for tensor in trained.values()]
        beside: list[Tensor] = []
        logged: list[Terms] = []
        drawn = list(self._draw(number))
        for units in _groups(drawn, self._at_once) or [
            [self._units[0][:1]]
        ]:  # a step without units takes one that counts as nothing
            sums = [tensor.new_zeros(len(units), *tensor.shape) for tensor in total]
            rows = [(index, place, 1 / len(unit)) for index, unit in enumerate(units) for place in unit]
            for start in range(0, len(rows), self._at_once):
                piece = rows[start : start + self._at_once]
                places = [place for _, place, _ in piece]
                found, without_rows, terms = self._row_gradients(number, len(logged), places, state, received, memory)
                beside, logged = beside or without_rows, logged + terms
                index, shares = torch.tensor([unit for unit, _, _ in piece]), [share for _, _, share in piece]
                for into, gradients in zip(sums, found, strict=True):
                    scaled = gradients * gradients.new_tensor(shares).view(-1, *[1] * (gradients.dim() - 1))
                    into.index_add_(0, index.to(into.device), scaled)
            for into, clipped in zip(total, clipped_sums(sums, self._privacy.clip if drawn else 0.0), strict=True):
                into += clipped
        expected, deviation = self._rate * len(self._units), self._privacy.deviation(self._silo.name)
        gradient = {
            name: (clipped + self._noise(number, name, clipped, deviation)) / expected + extra
            for (name, clipped, extra) in zip(trained, total, beside, strict=True)
        }
        return PrivateGradient(gradient, _mean(logged), sum(map(len, drawn)))

    def _draw(self, number: int) -> Iterator[list[Place]]:
        """Yield the rows of each drawn unit, at most `rows_per_unit` of each: a Poisson sample."""
        most, purpose = self._privacy.rows_per_unit, f"{self.phase.name}/{number}"
        chosen = self._stream.uniform("units", purpose, (len(self._units),)) < self._rate
        for index in chosen.nonzero().flatten().tolist():
            rows = self._units[index]
            if not rows:
                continue
            if len(rows) > most:
                order = self._stream.uniform("rows", f"{purpose}/{index}", (len(rows),)).argsort()[:most]
                rows = [rows[place] for place in sorted(order.tolist())]
            yield rows

    def _noise(self, number: int, name: str, like: Tensor, deviation: float) -> Tensor:
        uniform = self._stream.uniform("noise", f"{self.phase.name}/{number}/{name}", tuple(like.shape))
        return gaussian(uniform, deviation).to(like)

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
        terms = self._gradients.whole_batch(program, members, self._cut(batches))
        leaves = [self._leaves(copy) for copy in copies]
        found = [
            torch.stack([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in same])
            for same in zip(*leaves, strict=True)
        ]
        return found, gradients_of(without_rows, leaves[0]), terms

    def _leaves(self, state: State) -> list[Tensor]:
        return [tensor for name in self.phase.trains for tensor in state[name].values()]

    def _batch(self, place: Place) -> Batch:
        task, row = place
        rows, backbone = self._silo.train[task], self._context.backbone
        cost = backbone.call_cost if self._context.draws else None
        return make_batch(rows, rows.sequences([row]), backbone.pad_id, cost)

    def _cut(self, batches: Sequence[Batch]) -> list[MicroBatch]:
        backbone = self._context.backbone
        if self._context.draws:
            return join(batches, backbone.pad_id)
        return cut_jointly(batches, backbone.pad_id, backbone.call_cost)

    def _rows_at_once(self) -> int:
        """Return the most rows of one graph: one if a tuner cannot separate rows."""
        context = self._context
        if not all(can_share_forward(context.backbone, tuner) for tuner in context.tuners):
            return 1
        limit = token_limit(context, self.phase, [self._silo])
        longest = max(rows.longest for rows in self._silo.train.values())
        return _AT_ONCE if limit is None else max(1, min(_AT_ONCE, limit.rows(longest)))

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


def clipped_sums(gradients: Sequence[Tensor], bound: float) -> list[Tensor]:
    """Sum units' gradients, each scaled down to a norm of at most `bound`; those without a finite norm count as zero.

    Args:
        gradients: per tensor, shape (units, …).
        bound: of the L2 norm over all tensors.
    """
    flat = [each.reshape(len(each), -1) for each in gradients]
    largest = torch.stack([each.abs().amax(1) for each in flat]).amax(0)  # squares of small numbers would be 0
    scale = torch.where(largest > 0, largest, 1.0)
    norms = scale * torch.stack([(each / scale[:, None]).square().sum(1) for each in flat]).sum(0).sqrt()
    finite = norms < _LARGEST
    factors = torch.where(finite, (bound / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0), 0.0)
    return [
        torch.einsum("u,u...->...", factors, torch.where(finite.view(-1, *[1] * (each.dim() - 1)), each, 0.0))
        for each in gradients
    ]


def _groups(units: Sequence[list[Place]], most: int) -> list[list[list[Place]]]:
    """Group whole units, so that a group has not many more than `most` rows."""
    groups: list[list[list[Place]]] = []
    rows = most
    for unit in units:
        if rows + len(unit) > most:
            groups.append([])
            rows = 0
        groups[-1].append(unit)
        rows += len(unit)
    return groups


def _mean(logged: Sequence[Terms]) -> Terms:
    return {name: torch.stack([terms[name] for terms in logged]).mean() for name in logged[0]}
