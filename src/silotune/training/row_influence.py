"""`RowInfluence`: how many rows are behind the shared parts of a local round, by how strongly each pulls at them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from silotune.data.batching import Batch
from silotune.methods.head_mix import WhichHead, heads_of
from silotune.methods.phase import Phase
from silotune.methods.step import Step
from silotune.models.forward.mixing import trained_parts
from silotune.models.forward.views import View
from silotune.training.view_copies import WatchedView

_Loss = tuple[str, ...]
"""Phase, view, heads (none: the whole loss) and task."""


class RowInfluence:
    """Adds up each row's pulls over the steps of a local round.

    A row pulls in a step with the norm of its loss's gradient with respect to the model's answer (`Head.pulls`). Where
    the model is sure of a row's label, that is next to nothing, whatever stands in the row: of a broadcast that is sure
    of one label, the update tells the rows of the others alone. The whole loss, whatever its terms are (contrasts,
    distillation, CKA), is looked at one layer earlier: a row pulls with the norm of the loss's gradient with respect to
    what is read of its view. What adapters let through of a row is not looked at.

    Args:
        shared: names of the parts that leave. Pulls at other parts do not count.
    """

    def __init__(self, shared: Collection[str]) -> None:
        self._shared = frozenset(shared)
        self._phase: Phase | None = None
        self._pulls: dict[_Loss, Tensor] = {}

    def begin(self, phase: Phase) -> None:
        """Begin a phase, whose losses are counted by themselves."""
        self._phase = phase

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

    def _counts(self, view: str, head: WhichHead = "") -> bool:
        """Return whether a loss over a view trains a part that leaves.

        Where a phase computes a shared part from others (`Phase.then`), all parts that it trains are such parts.
        """
        phase = self._phase
        assert phase is not None, "a phase has begun"
        trained = {*phase.trains} if self._shared.intersection(phase.then) else self._shared.intersection(phase.trains)
        mixed = [head] if isinstance(head, str) else head
        return bool(trained_parts(mixed, trained) or trained_parts(phase.views.get(view, {}), trained))

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
        sums = self._pulls.setdefault(key, torch.zeros(len(batch.source), dtype=torch.float64))
        sums.index_add_(0, rows.cpu(), pulls.cpu().double())

    def effective_rows(self) -> float | None:
        """Return the effective number of rows, `(Σ w)² / Σ w²` over the rows' pulls w (Kish 1965).

        The smallest of all losses counts; None if nothing pulled. Pulls that are not finite count as one row's.
        """
        pulls = [sums for sums in self._pulls.values() if sums.any()]
        found = (float(sums.sum() ** 2 / sums.square().sum()) for sums in pulls)
        return min((rows if math.isfinite(rows) else 1.0 for rows in found), default=None)
