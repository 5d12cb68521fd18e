"""`RowInfluence`: how many rows are behind the shared parts of a local round, by how strongly each pulls at them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from silotune.methods.base import Phase, Step
from silotune.methods.head_mix import WhichHead, heads_of
from silotune.models.forward.mixing import trained_parts


class RowInfluence:
    """Adds up each row's pulls over the steps of a local round.

    A row pulls in a step with the norm of its loss's gradient with respect to the model's answer (`Head.pulls`). Where
    the model is sure of a row's label, that is next to nothing, whatever stands in the row: of a broadcast that is sure
    of one label, the update tells the rows of the others alone. What adapters or a hidden layer let through of a row
    is not looked at.

    Args:
        shared: names of the parts that leave. Pulls at other parts do not count.
    """

    def __init__(self, shared: Collection[str]) -> None:
        self._shared = frozenset(shared)
        self._phase: Phase | None = None
        self._pulls: dict[tuple[str, ...], Tensor] = {}

    def begin(self, phase: Phase) -> None:
        """Begin a phase, whose losses are counted by themselves."""
        self._phase = phase

    def __call__(self, step: Step, view: str, head: WhichHead) -> None:
        """Add the pulls of a step's rows in one loss.

        Where a phase computes a shared part from others (`Phase.then`), pulls at all parts that it trains count.
        """
        phase = self._phase
        assert phase is not None, "a phase has begun"
        trained = {*phase.trains} if self._shared.intersection(phase.then) else self._shared.intersection(phase.trains)
        mixed = [head] if isinstance(head, str) else head
        if not trained_parts(mixed, trained) and not trained_parts(phase.views[view], trained):
            return
        batch, pulls = step.batch, step.pulls(view, head).cpu().double()
        rows = batch.rows if len(pulls) == len(batch) else batch.rows.sort().values[::2]  # pairs stand side by side
        assert batch.source is not None, "training rows have a source"
        key = (phase.name, view, *heads_of(head), batch.task.name)
        sums = self._pulls.setdefault(key, torch.zeros(len(batch.source), dtype=torch.float64))
        sums.index_add_(0, rows.cpu(), pulls)

    def effective_rows(self) -> float | None:
        """Return the effective number of rows, `(Σ w)² / Σ w²` over the rows' pulls w (Kish 1965).

        The smallest of all losses counts; None if nothing pulled.
        """
        pulls = [sums for sums in self._pulls.values() if sums.any()]
        return min((float(sums.sum() ** 2 / sums.square().sum()) for sums in pulls), default=None)
