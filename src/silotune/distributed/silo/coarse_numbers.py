"""`CoarseNumbers` rounds numbers before they leave, and adds noise to scores: fine ones tell single rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from silotune.communication.privacy.laplace import laplace_number
from silotune.core.randomness import sampler
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
        losses: splits whose scores are losses, which are no percentages.
        noise: scale of the Laplace noise of a score, in rows of its split: what that many rows can change.
        behind: split → over how many rows its score is spread (`rows_behind`); without an entry all of them.
        drawn_for: key and purpose of the noise, the same for a repeated request.
        least: the least score there is; the largest is 100, or none of losses.
    """

    digits: int | None
    rows: Mapping[str, int] = field(default_factory=dict)
    losses: Collection[str] = ()
    noise: float = 0.0
    behind: Mapping[str, int] = field(default_factory=dict)
    drawn_for: tuple[int, str] = (0, "")
    least: float = 0.0

    def scores(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return an entry of scores with `validation` and `test` rounded; its row counts stay."""
        return {name: self._score(value, name) if name in _SPLITS else value for name, value in entry.items()}

    def metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return a local round's metrics with the losses rounded, and seconds to two digits; counts stay."""
        if self.digits is None:
            return dict(metrics)
        return {
            name: self._rounded(value, "train", percent=False) if name not in (*COUNTS, "seconds") else value
            for name, value in metrics.items()
        } | ({} if metrics.get("seconds") is None else {"seconds": float(f"{metrics['seconds']:.1e}")})

    def _score(self, value: float | None, split: str) -> float | None:
        if value is None or not self.noise:
            return self._rounded(value, split, percent=split not in self.losses)
        whole = 1.0 if split in self.losses else 100.0
        drawn = laplace_number(sampler(*self.drawn_for, split, repr(value)).random())
        spread = self.behind.get(split, self.rows.get(split, 0))
        noised = value + self.noise * drawn * whole / max(rounded_rows(spread), 1)
        rounded = self._rounded(noised, split, percent=split not in self.losses)
        assert rounded is not None, "there is a score"
        return max(self.least, rounded if split in self.losses else min(rounded, 100.0))

    def _rounded(self, value: float | None, split: str, percent: bool) -> float | None:
        if value is None or self.digits is None:
            return value
        digits, whole = (self.digits, 100.0) if percent else (self.digits + 1, 1.0)
        step = max(10.0**-digits, whole / max(rounded_rows(self.rows.get(split, 0)), 1))
        return round(round(value / step) * step, 9)  # without the product's last bits
