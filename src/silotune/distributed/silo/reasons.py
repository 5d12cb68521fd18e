"""Why something failed at a silo, in one of a few phrases: with `reasons` in `share` the coordinator may know them."""

from __future__ import annotations

import errno
import sqlite3

import torch

_FULL = (errno.ENOSPC, errno.EDQUOT)

_PHRASES: tuple[tuple[type[BaseException], str], ...] = (
    (FileNotFoundError, "a file is missing"),
    (PermissionError, "a file may not be opened"),
    (UnicodeError, "a file is not in the encoding that it should have"),
    (MemoryError, "not enough memory"),
    (torch.OutOfMemoryError, "not enough memory of the device"),
    (sqlite3.Error, "the records cannot be read or written"),
    (OSError, "a file cannot be read or written"),
)


def phrase(error: BaseException, otherwise: str = "something else") -> str:
    """Return a fixed phrase for an error or its cause; the error's own text may quote a row and stays here."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return "no space is left on the disk"
        for kind, words in _PHRASES:
            if isinstance(cause, kind):
                return words
        cause = cause.__cause__
    return otherwise
