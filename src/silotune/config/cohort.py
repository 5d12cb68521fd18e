"""The key `cohort`: how many silos train in one forward and backward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

_MOST = 10_000


def _size(given: object) -> object:
    if given == "auto" or (isinstance(given, int) and 1 <= given <= _MOST):
        return given
    raise ValueError(f"must be a number of silos (1 to {_MOST}), or auto (got {given!r})")


CohortSize = Annotated[int | Literal["auto"], BeforeValidator(_size)]
"""1: one after the other; `auto`: what pays on the device, where the tuner allows it."""
