"""Errors a user can cause. Each carries one clear line; the CLI prints it without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class SilotuneError(Exception):
    """Something went wrong while working (exit code 1)."""

    exit_code = 1


class InputError(SilotuneError):
    """Bad configuration, data, adapter or message: names the culprit and what is allowed (exit code 2)."""

    exit_code = 2


class Diverged(SilotuneError):
    """Training went to infinity or to no number at all: a matter of the learning rate, most often."""


def unknown(what: str, name: object, allowed: Iterable[str], or_else: str = "") -> InputError:
    """An `InputError` for a name that is not among `allowed`, with the nearest one as a suggestion.

    `or_else` says what is allowed beside the names.
    """
    names = sorted(allowed)
    group, dot, last = str(name).rpartition(".")
    # of dotted keys only the last word may be wrong: the rest would make all of them look alike
    words = {key.removeprefix(group + dot): key for key in names if key.startswith(group + dot)}
    near = difflib.get_close_matches(last, words, n=1)
    hint = f" (did you mean {words[near[0]]!r}?)" if near else ""
    choice = f"{', '.join(names) or 'none'}{', ' if or_else else ''}{or_else}"
    return InputError(f"unknown {what} {str(name)!r}{hint}; allowed: {choice}")


def require_unused(path: Path, option: str = "", remedy: str = "choose another folder") -> None:
    """Refuse to write into a folder that holds anything, or where a file is.

    Raises:
        InputError: naming the option (if any), the path and what to do.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        culprit = f"{option} {path}" if option else str(path)
        raise InputError(f"{culprit}: already there and not empty; {remedy}")


OR_RESUME = "choose another folder or add --resume"
"""The remedy where work can be continued."""
