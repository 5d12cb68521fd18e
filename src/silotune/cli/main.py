"""The entry point of `silotune`: it runs the command and turns errors into one line and an exit code."""

# All slow imports are inside `main`, which catches a Ctrl-C during them.
from __future__ import annotations

import codecs
import errno
import json
import signal
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING

from silotune.cli import termination

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_INTERRUPTED, _TERMINATED = 130, 143

_GC_THRESHOLD = 100_000
"""New objects between two runs of the garbage collector. Importing torch and transformers and reading rows makes
millions of objects that stay; with Python's default of 700, collections took a fifth of the start."""


def main() -> None:
    """Entry point of `silotune`."""
    codecs.register_error("silotune", _escaped)
    if isinstance(sys.stdout, TextIOWrapper):  # Python itself escapes on stderr
        sys.stdout.reconfigure(errors="silotune")
    before, sys.unraisablehook = sys.unraisablehook, _repeat_ctrl_c
    termination.interruptions.clear()
    if handles := signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, termination.interrupt)
    try:
        code = _run_command()
    except Exception as error:
        code = _INTERRUPTED if termination.interruptions else _report(error)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    finally:
        sys.unraisablehook = before
        if handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if code == _INTERRUPTED:
        _ignore_ctrl_c()
        terminated = signal.SIGTERM in termination.interruptions
        code, what = (_TERMINATED, "terminated") if terminated else (code, "interrupted")
        _complain(f"{what}; what is finished is kept (run again with --resume)", "yellow")
    sys.exit(code)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Write characters that a console's encoding lacks as JSON writes them, so that printed JSON stays what it is."""
    assert isinstance(error, UnicodeEncodeError), "it handles errors of writing"
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _run_command() -> int:
    """Run the command that `sys.argv` names, and return its exit code; typer returns 130 for a Ctrl-C inside it."""
    import gc

    gc.set_threshold(_GC_THRESHOLD, 50, 100)
    from silotune.cli.app import app

    code = app(standalone_mode=False, prog_name="silotune")
    return code if isinstance(code, int) else 0


def _report(error: Exception) -> int:
    """Print an error in one line and return the exit code.

    Raises:
        Exception: the error itself, if it is a bug.
    """
    import click

    from silotune.errors import SilotuneError

    if isinstance(error, SilotuneError):
        _complain(str(error))
        return error.exit_code
    if isinstance(error, click.Abort):
        return _INTERRUPTED
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # click has printed the help
        _complain("missing command")
        return 2
    if isinstance(error, click.ClickException):
        usage = error.ctx.get_usage() if isinstance(error, click.UsageError) and error.ctx else ""
        _complain(f"{error.format_message()} {usage}")
        return 2
    if isinstance(error, OSError | MemoryError):  # e.g. a full disk or a read-only folder
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = (
            "; free space, then run again with --resume, which goes on from the last finished round" if full else ""
        )
        _complain(f"{str(error) or 'out of memory'}{remedy}")
        return 1
    reason = str(error)
    if isinstance(error, RuntimeError) and ("out of memory" in reason or "allocate memory" in reason):  # from PyTorch
        remedy = "train.tokens_at_once=auto, or a lower train.batch_size, needs less"
        _complain(f"out of memory; {remedy} ({reason.splitlines()[0]})")
        return 1
    raise error


def _complain(message: str, style: str = "red") -> None:
    from rich.console import Console

    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    errors.print(f"silotune: {' '.join(message.split())}", style=style, markup=False)


def _repeat_ctrl_c(unraisable: UnraisableHookArgs) -> None:
    """Raise a Ctrl-C again that Python would drop, because it fell into a callback such as a weak reference's."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        from _thread import interrupt_main
        from threading import Timer

        Timer(0.05, interrupt_main).start()  # an error raised before this function returns is dropped, too
    else:
        sys.__unraisablehook__(unraisable)


def _ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
