"""Small sums that several rooms share, and how tables write scores and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable


def ceil_fraction(share: float, number: int) -> int:
    """Return `⌈share · number⌉`, tolerant of floating-point error just above a whole number."""
    return math.ceil(share * number - 1e-9)


def mean_ignoring_none(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are no such values.

    The sum is exact (`math.fsum`), so the mean does not depend on the values' order; rounds are compared by such means.
    """
    present = [value for value in values if value is not None]
    return math.fsum(present) / len(present) if present else None


def score_text(value: float | None) -> str:
    """Return a score with two digits; a dash if there is none."""
    return "–" if value is None else f"{value:.2f}"
