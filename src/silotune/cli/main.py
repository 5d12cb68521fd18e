"""Entry point of the command line: imports the commands, and turns errors into one line and an exit code."""

from __future__ import annotations

import gc
import sys
from importlib import import_module

import click
from rich.console import Console

from silotune.cli.app import app
from silotune.errors import SilotuneError

_INTERRUPTED = 130

_COMMAND_MODULES = (
    "catalog",
    "compare",
    "cost",
    "federation",
    "export_predict",
    "partition",
    "report",
    "run",
    "transfer",
)
"""Modules of `silotune.cli` that register commands with `app` when they are imported, in the order of the help. All
are imported at every start, so each imports torch and other slow libraries inside its commands only."""

_GC_THRESHOLD = 100_000
"""New objects between two runs of the garbage collector. Importing torch and transformers and reading rows makes
millions of objects that stay; with Python's default of 700, collections took a fifth of the start."""

errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def main() -> None:
    """Entry point of `silotune`."""
    gc.set_threshold(_GC_THRESHOLD, 50, 100)
    try:
        for name in _COMMAND_MODULES:
            import_module(f"silotune.cli.{name}")
        code = app(standalone_mode=False, prog_name="silotune")
    except SilotuneError as error:
        _complain(str(error))
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError:  # click has printed the help
        _complain("missing command")
        sys.exit(2)
    except click.ClickException as error:
        usage = error.ctx.get_usage() if isinstance(error, click.UsageError) and error.ctx else ""
        _complain(f"{error.format_message()} {usage}")
        sys.exit(2)
    except (OSError, MemoryError) as error:  # e.g. a full disk or a read-only folder
        _complain(str(error) or "out of memory")
        sys.exit(1)
    except RuntimeError as error:
        if "out of memory" not in str(error) and "allocate memory" not in str(error):  # PyTorch's messages
            raise
        _complain(f"out of memory; a lower train.batch_size needs less ({str(error).splitlines()[0]})")
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        code = _INTERRUPTED
    if code == _INTERRUPTED:  # typer returns this code for Ctrl-C inside a command
        errors.print("silotune: interrupted; what is finished is kept (run again with --resume)", style="yellow")
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> None:
    """Print a message on one line in red."""
    errors.print(f"silotune: {' '.join(message.split())}", style="red", markup=False)
