"""Errors that end a command in one line: mistakes of users, and training that diverges."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path


class SilotuneError(Exception):
    """Base of all errors that silotune raises on purpose; exit code 1."""

    exit_code = 1


class InputError(SilotuneError):
    """Bad configuration, data, adapter or message; the message names the culprit and what is allowed. Exit code 2."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback: the message alone."""
        return [f"{type(self).__name__}: {self}"]


class Diverged(SilotuneError):
    """The training loss became infinite or NaN, most often because the learning rate is too high."""


def unknown_name_error(
    what: str, name: object, allowed: Iterable[str], or_else: str = "", elsewhere: Iterable[str] = ()
) -> InputError:
    """Build the error for a name that is not allowed, with the closest allowed name as a suggestion.

    Args:
        what: kind of the name, for the message.
        name: the rejected name.
        allowed: allowed names.
        or_else: what is allowed besides the names.
        elsewhere: dotted names of other groups, one of which may be meant.

    Returns:
        The error, for the caller to raise.
    """
    import difflib  # needed for errors only

    names = sorted(allowed)
    group, dot, last = str(name).rpartition(".")
    # compare only the last word of dotted keys: a common prefix would make all of them look similar
    words = {key.removeprefix(group + dot): key for key in names if key.startswith(group + dot)}
    near = [words[word] for word in difflib.get_close_matches(last, words, n=1)]
    others = [key for key in elsewhere if key not in names]
    same = [key for key in others if key.rpartition(".")[2] == last]
    if not near and not same:
        by_word = {key.rpartition(".")[2]: key for key in reversed(others)}
        same = [by_word[word] for word in difflib.get_close_matches(last, by_word, n=1)]
    meant = " or ".join(map(repr, [*near, *same][:3]))
    hint = f" (did you mean {meant}?)" if meant else ""
    choice = f"{', '.join(names) or 'none'}{', ' if or_else else ''}{or_else}"
    return InputError(f"unknown {what} {str(name)!r}{hint}; allowed: {choice}")


def require_known(what: str, name: object, allowed: Collection[str], or_else: str = "") -> None:
    """Raise the error of `unknown_name_error`, with the same arguments, if a name is not allowed."""
    if name not in allowed:
        raise unknown_name_error(what, name, allowed, or_else)


@contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Turn an `OSError` into an `InputError`: `what`, such as `--to x: cannot be written`, and the reason."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{what} ({error.strerror or error})") from error


@contextmanager
def library_errors(what: str, remedy: str = "") -> Iterator[None]:
    """Turn whatever another library raises over a user's file into an `InputError`: `what`, its reason, the remedy.

    Only the library's call belongs inside: of tokenizers, transformers and the hub's client it catches every type.
    """
    try:
        yield
    except (SilotuneError, MemoryError):
        raise
    except Exception as error:
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{what} ({first}){remedy}") from error


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import into an `InputError`: `what`, such as `sweep: needs the package optuna`, and the remedy."""
    try:
        yield
    except ImportError as error:
        raise InputError(f"{what}; pip install 'silotune[{extra}]'") from error


def require_unused(path: Path, option: str = "", remedy: str = "choose another folder") -> None:
    """Refuse an output folder that is not empty, or a path that is a file.

    Args:
        path: the folder to write into.
        option: command-line option that named it, for the message.
        remedy: what the user can do, for the message.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        culprit = f"{option} {path}" if option else str(path)
        if not path.is_dir():
            raise InputError(f"{culprit}: is a file, not a folder; choose another folder")
        raise InputError(f"{culprit}: already there and not empty; {remedy}")


OR_RESUME = "choose another folder or add --resume (Python: out=…, resume=True)"
"""Remedy for commands that can continue an earlier run."""
