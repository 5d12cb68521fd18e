"""`CoarseNumbers` rounds scores and losses before they leave: a fine one tells single rows, by two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from silotune.distributed.protocol.disclosure import COUNTS
from silotune.distributed.silo.exposure import rounded_rows

_SPLITS = ("validation", "test")


@dataclass(frozen=True)
class CoarseNumbers:
    """Rounds to multiples of a step, none finer than one row of the split can change a mean.

    The number of rows enters rounded down, as the step tells it.

    Args:
        digits: decimal digits of a score in percent; a loss has one more. None: nothing is rounded.
        rows: split → how many rows it has.
        losses: whether scores are losses, which are no percentages.
    """

    digits: int | None
    rows: Mapping[str, int] = field(default_factory=dict)
    losses: bool = False

    def scores(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return an entry of scores with `validation` and `test` rounded; its row counts stay."""
        return {
            name: self._rounded(value, name, percent=not self.losses) if name in _SPLITS else value
            for name, value in entry.items()
        }

    def metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return a local round's metrics with the losses rounded; counts and seconds stay."""
        exact = {*COUNTS, "seconds"}
        return {
            name: value if name in exact else self._rounded(value, "train", percent=False)
            for name, value in metrics.items()
        }

    def _rounded(self, value: float | None, split: str, percent: bool) -> float | None:
        if value is None or self.digits is None:
            return value
        digits, whole = (self.digits, 100.0) if percent else (self.digits + 1, 1.0)
        step = max(10.0**-digits, whole / max(rounded_rows(self.rows.get(split, 0)), 1))
        return round(round(value / step) * step, 9)  # without the product's last bits
