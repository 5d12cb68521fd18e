"""What views that a phase does not change say of a row, kept for the phase's later passes over the same rows.

Anchors (FedMCP's averaged adapter, MOON's and FedFAME's previous and global model) and parts that a phase leaves alone
give a row the same representation in every local epoch; only the first computes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from silotune.data.batching import Batch
from silotune.data.tokenized import TokenizedRows
from silotune.models.forward.mixing import Mix, parsed


def constant_views(views: Mapping[str, Mix], trains: Collection[str]) -> frozenset[str]:
    """Those whose parts and weights stay as they are while these parts are trained."""

    def moves(name: str) -> bool:
        anchor, part = parsed(name)
        return anchor not in ("received", "previous") and part in trains

    return frozenset(
        view
        for view, mix in views.items()
        if not any(moves(name) for name in mix) and all(isinstance(weight, int | float) for weight in mix.values())
    )


@dataclass
class _Table:
    """Of one view: which of a silo's rows are known (on the CPU), and each reading of all rows."""

    source: TokenizedRows  # kept: tables are found by its id, which else might be used again
    known: Tensor
    readings: dict[str, Tensor] = field(default_factory=dict)


class ConstantViewCache:
    """One silo's, for one phase; as much memory as its rows' readings take, for each of the views."""

    def __init__(self, views: Iterable[str] = ()) -> None:
        self.views = frozenset(views)
        self._tables: dict[tuple[str, int], _Table] = {}

    def get(self, view: str, batch: Batch, rows: slice) -> dict[str, Tensor] | None:
        """Reading → tensor of shape (rows, …), for some rows of a batch; None unless all are known."""
        table = self._tables.get((view, id(batch.source)))
        chosen = batch.rows[rows]
        if table is None or not bool(table.known[chosen].all()):
            return None
        return {name: values[chosen.to(values.device)] for name, values in table.readings.items()}

    def put(self, view: str, batch: Batch, rows: slice, readings: Mapping[str, Tensor]) -> None:
        """What was found of some rows of a batch."""
        source = batch.source
        if source is None:
            return
        key = (view, id(source))
        if key not in self._tables:
            self._tables[key] = _Table(source, torch.zeros(len(source), dtype=torch.bool))
        table = self._tables[key]
        chosen = batch.rows[rows]
        table.known[chosen] = True
        for name, values in readings.items():
            if name not in table.readings:
                table.readings[name] = values.new_zeros(len(source), *values.shape[1:])
            table.readings[name][chosen.to(values.device)] = values.detach()
