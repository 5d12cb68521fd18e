"""Shares of a number."""

from __future__ import annotations

import math


def share_of(share: float, number: int) -> int:
    """A share of a number, rounded up; what is only rounding error above a whole number is that number."""
    return math.ceil(share * number - 1e-9)
