"""Section `generation`: how many prompts are answered at once (beams are keys of `head`); defines `RowsAtOnce`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from silotune.config.section import Section

_MOST = 2**16


def _rows(given: object) -> object:
    if given == "auto" or (isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= _MOST):
        return given
    raise ValueError(f"must be a number of rows (1 to {_MOST}), or auto (got {given!r})")


RowsAtOnce = Annotated[int | Literal["auto"], BeforeValidator(_rows)]
"""Rows of one batch without gradient; `auto` chooses the number by the device's memory."""


class GenerationConfig(Section):
    """How answers are written (`head=lm`).

    Attributes:
        rows_at_once: prompts that are answered together; each takes the memory of `head.beams` answers.
    """

    rows_at_once: RowsAtOnce = 32
