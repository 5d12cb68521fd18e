"""`RowInfluence`: how many rows and steps are behind the shared parts of a local round, by how strongly each pulls."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from silotune.core.tensors import State, Tensors, flatten
from silotune.data.batching import Batch
from silotune.methods.head_mix import WhichHead, heads_of
from silotune.methods.phase import Phase
from silotune.methods.step import Step
from silotune.models.forward.mixing import trained_parts
from silotune.models.forward.views import View
from silotune.training.view_copies import WatchedView

_Loss = tuple[str, ...]
"""Phase, view, heads (none: the whole loss) and task."""

_ROUNDING = 1e-6
"""Share of a phase's movement below which a tensor's is that of rounding: of a key's bias, which no loss depends on."""


class RowInfluence:
    """Adds up each row's pulls over the steps of a local round, and measures how far each step moves each tensor.

    A row pulls in a step with the norm of its loss's gradient with respect to the model's answer (`Head.pulls`). Where
    the model is sure of a row's label, that is next to nothing, whatever stands in the row: of a broadcast that is sure
    of one label, the update tells the rows of the others alone. The whole loss, whatever its terms are (contrasts,
    distillation, CKA), is looked at one layer earlier: a row pulls with the norm of the loss's gradient with respect to
    what is read of its view. What adapters let through of a row is not looked at.

    The same pull moves parts far in one step and hardly in the next, if a large scale of an adapter (`tuner.alpha`)
    drives the model, in its first step, to where no gradient comes through. So rows are counted a second time, for each
    tensor that leaves: by their shares of a step's pulls, times how far the step moves the tensor.

    Args:
        shared: names of the parts that leave. Pulls at other parts do not count.
    """

    def __init__(self, shared: Collection[str]) -> None:
        self._shared = frozenset(shared)
        self._phase: Phase | None = None
        self._pulls: dict[_Loss, Tensor] = {}
        self._shares: dict[_Loss, dict[int, list[tuple[Tensor, Tensor]]]] = defaultdict(lambda: defaultdict(list))
        """Step → rows and their pulls, a micro-batch each."""
        self._leaves: Tensors = {}
        self._before: Tensors = {}
        self._moves: dict[str, list[list[float]]] = {}
        """Phase → step → how far it moved each tensor."""
        self._rows_of: dict[str, list[int]] = {}
        """Phase → step → its rows."""

    def begin(self, phase: Phase, state: State) -> None:
        """Begin a phase, whose losses are counted by themselves.

        Args:
            phase: the phase.
            state: with the tensors that it trains, which its steps change in place.
        """
        self._phase = phase
        self._leaves = flatten({name: state[name] for name in phase.trains if name in self._trained})
        self._moves[phase.name], self._rows_of[phase.name] = [], []

    def before_step(self) -> None:
        """Note the tensors before an optimizer step."""
        self._before = {name: tensor.detach().clone() for name, tensor in self._leaves.items()}

    def after_step(self, batch: Batch) -> None:
        """Measure how far an optimizer step on a batch moved the tensors."""
        assert self._phase is not None, "a phase has begun"
        pairs = batch.source is not None and batch.source.pairs
        self._rows_of[self._phase.name].append(len(batch) // (2 if pairs else 1))
        moves = [(tensor.detach() - self._before[name]).float().norm() for name, tensor in self._leaves.items()]
        self._moves[self._phase.name].append(torch.stack(moves).tolist() if moves else [])

    def __call__(self, step: Step, view: str, head: WhichHead) -> None:
        """Add the pulls of a step's rows in one cross-entropy."""
        if self._counts(view, head):
            self._add(step.batch, view, heads_of(head), step.pulls(view, head))

    def watched(self, views: Mapping[str, View], batch: Batch) -> dict[str, View]:
        """Return a step's views; the backward pass then adds the pulls of its rows in the whole loss."""
        return {
            name: WatchedView(view, partial(self._add_gradient, batch, name)) if self._counts(name) else view
            for name, view in views.items()
        }

    @property
    def _trained(self) -> frozenset[str]:
        """The parts that the phase trains and that leave.

        Where a phase computes a shared part from others (`Phase.then`), all parts that it trains are such parts.
        """
        phase = self._phase
        assert phase is not None, "a phase has begun"
        return frozenset(phase.trains) if self._shared.intersection(phase.then) else self._shared & {*phase.trains}

    def _counts(self, view: str, head: WhichHead = "") -> bool:
        """Return whether a loss over a view trains a part that leaves."""
        assert self._phase is not None, "a phase has begun"
        mixed, trained = [head] if isinstance(head, str) else head, self._trained
        return bool(trained_parts(mixed, trained) or trained_parts(self._phase.views.get(view, {}), trained))

    def _add_gradient(self, batch: Batch, view: str, gradient: Tensor) -> None:
        self._add(batch, view, (), gradient.detach().double().flatten(1).norm(dim=1))

    def _add(self, batch: Batch, view: str, heads: Sequence[str], pulls: Tensor) -> None:
        """Add pulls of shape (rows,), or (pairs,), to the sums of their rows."""
        assert self._phase is not None, "a phase has begun"
        assert batch.source is not None, "training rows have a source"
        rows = batch.rows
        if batch.source.pairs:  # they stand side by side in the source, and count as one row
            pulls = pulls[rows.argsort()].reshape(-1, 2).sum(1) if len(pulls) == len(rows) else pulls
            rows = rows.sort().values[::2]
        key = (self._phase.name, view, *heads, batch.task.name)
        rows, pulls = rows.cpu(), pulls.detach().cpu().double()
        sums = self._pulls.setdefault(key, torch.zeros(len(batch.source), dtype=torch.float64))
        sums.index_add_(0, rows, pulls)
        self._shares[key][len(self._moves[self._phase.name])].append((rows, pulls))

    def effective_rows(self) -> float | None:
        """Return the effective number of rows, `(Σ w)² / Σ w²` over the rows' pulls w (Kish 1965).

        The smallest of all losses and tensors counts; None if nothing pulled. Pulls that are not finite count as one
        row's.
        """
        pulls = [sums for sums in self._pulls.values() if sums.any()]
        moved = [sums for key in self._pulls for sums in self._pulls_by_movement(key) if sums.any()]
        return min(map(_effective, [*pulls, *moved]), default=None)

    def rows_of_steps(self) -> float | None:
        """Return the rows of all steps, each step counted by how far it moves a tensor: the smallest of all tensors.

        `(Σ m)² / Σ (m² / n)` over the movements m and the rows n of steps: n where one step moves it all, and n times
        the number of steps where all move it as far. None if nothing moved.
        """
        found = (
            _effective(moved, torch.tensor(self._rows_of[phase], dtype=torch.float64))
            for phase in self._moves
            for moved in self._movements(phase)
        )
        return min(found, default=None)

    def _movements(self, phase: str) -> Iterator[Tensor]:
        """Yield how far each step moved a tensor, shape (steps,), for each that was moved."""
        moves = torch.tensor(self._moves[phase], dtype=torch.float64)
        if moves.numel():
            total = moves.sum(0)
            yield from moves[:, ~(total <= _ROUNDING * total.sum())].unbind(1)

    def _pulls_by_movement(self, key: _Loss) -> Iterator[Tensor]:
        """Yield, for each tensor, the rows' shares of each step's pulls times how far the step moved the tensor."""
        rows, shares, steps = [], [], []
        for step, pieces in self._shares[key].items():
            pulls = torch.cat([pulls for _, pulls in pieces])
            if pulls.any():
                rows.append(torch.cat([rows for rows, _ in pieces]))
                shares.append(pulls / pulls.sum())
                steps.append(torch.full((len(pulls),), step))
        for moved in self._movements(key[0]) if rows else ():
            yield torch.zeros_like(self._pulls[key]).index_add_(
                0, torch.cat(rows), torch.cat(shares) * moved[torch.cat(steps)]
            )


def _effective(weights: Tensor, rows: Tensor | float = 1.0) -> float:
    """Return `(Σ w)² / Σ (w² / rows)`; 1 where a weight is not finite."""
    found = float(weights.sum() ** 2 / (weights.square() / rows).sum())
    return found if math.isfinite(found) else 1.0
