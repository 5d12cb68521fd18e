"""The mean of scores of which some may be missing."""

from __future__ import annotations

import math
from collections.abc import Iterable


def ceil_fraction(share: float, number: int) -> int:
    """A share of a number, rounded up; what is only rounding error above a whole number is that number."""
    return math.ceil(share * number - 1e-9)


def mean_ignoring_none(values: Iterable[float | None]) -> float | None:
    """The mean of those that are there, in any order of them; None where none is.

    The sum is exact before it is divided, so that equal sums have equal means: rounds are compared by them.
    """
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
