"""`ConstantViewCache`: poolings of views in which nothing trains in a phase, kept for its later epochs.

Anchors (FedMCP's averaged adapter, MOON's and FedFAME's previous and global model) and parts that a phase does not
train give a row the same representation in every local epoch; only the first epoch computes it.

`activation_cache` has a table of how the two caches differ, and why they are two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from silotune.data.batching import Batch
from silotune.data.tokenized import TokenizedRows
from silotune.models.forward.mixing import Mix, members, parse_name


def constant_views(views: Mapping[str, Mix], trains: Collection[str]) -> frozenset[str]:
    """The names of the views whose parts and weights do not change while these parts are trained."""

    def changes(name: str) -> bool:
        anchor, part = parse_name(name)
        return anchor not in ("received", "previous") and not {*members(part)}.isdisjoint(trains)

    return frozenset(
        view
        for view, mix in views.items()
        if not any(changes(name) for name in mix) and all(isinstance(weight, int | float) for weight in mix.values())
    )


@dataclass
class _Table:
    """One view's poolings of a set of rows.

    Args:
        source: the set; held, so that its id is not used again.
        filled: shape (rows of the set,), bool, on the CPU: the rows whose poolings are kept.
        poolings: pooling's name → tensor of shape (rows of the set, hidden).
    """

    source: TokenizedRows
    filled: Tensor
    poolings: dict[str, Tensor] = field(default_factory=dict)


class ConstantViewCache:
    """One silo's constant views, by view and set of rows, for one phase. Nothing is evicted.

    Args:
        views: names of the views to keep.
    """

    def __init__(self, views: Iterable[str] = ()) -> None:
        self.views = frozenset(views)
        self._tables: dict[tuple[str, int], _Table] = {}

    def get(self, view: str, batch: Batch, rows: slice) -> dict[str, Tensor] | None:
        """Read a view's poolings of some rows of a batch.

        Returns:
            Pooling's name → tensor of shape (rows, hidden); None unless all rows are kept.
        """
        table = self._tables.get((view, id(batch.source)))
        chosen = batch.rows[rows]
        if table is None or not bool(table.filled[chosen].all()):
            return None
        return {name: values[chosen.to(values.device)] for name, values in table.poolings.items()}

    def put(self, view: str, batch: Batch, rows: slice, poolings: Mapping[str, Tensor]) -> None:
        """Keep a view's poolings of some rows of a batch, each of shape (rows, hidden), without gradient."""
        source = batch.source
        if source is None:
            return
        key = (view, id(source))
        if key not in self._tables:
            self._tables[key] = _Table(source, torch.zeros(len(source), dtype=torch.bool))
        table = self._tables[key]
        chosen = batch.rows[rows]
        table.filled[chosen] = True
        for name, values in poolings.items():
            if name not in table.poolings:
                table.poolings[name] = values.new_zeros(len(source), *values.shape[1:])
            table.poolings[name][chosen.to(values.device)] = values.detach()
