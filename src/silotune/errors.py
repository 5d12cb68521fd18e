"""Errors a user can cause. Each carries one clear line; the CLI prints it without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SilotuneError(Exception):
    """Something went wrong while working (exit code 1)."""

    exit_code = 1


class InputError(SilotuneError):
    """Bad configuration, data, adapter or message: names the culprit and what is allowed (exit code 2)."""

    exit_code = 2


def unknown(what: str, name: object, allowed: Iterable[str], or_else: str = "") -> InputError:
    """An `InputError` for a name that is not among `allowed`, with the nearest one as a suggestion.

    `or_else` says what is allowed beside the names.
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    choice = f"{', '.join(names) or 'none'}{', ' if or_else else ''}{or_else}"
    return InputError(f"unknown {what} {str(name)!r}{hint}; allowed: {choice}")
