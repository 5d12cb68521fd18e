"""The command line. Bad input ends with one line and exit code 2; `Ctrl-C` with 130."""

from __future__ import annotations

import gc
import sys

import click
from rich.console import Console

from silotune.cli.app import app
from silotune.errors import SilotuneError

_INTERRUPTED = 130

_OBJECTS = 100_000
"""New objects between two searches for unreachable cycles. Python's 700 made a fifth of a start searches: importing
torch and transformers and reading rows makes millions of objects that all stay."""

errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def main() -> None:
    """Entry point of `silotune`."""
    gc.set_threshold(_OBJECTS, 50, 100)
    try:
        # they register their commands
        from silotune.cli import catalog as catalogue  # noqa: F401
        from silotune.cli import compare as comparing  # noqa: F401
        from silotune.cli import cost as costs  # noqa: F401
        from silotune.cli import export_predict as interop  # noqa: F401
        from silotune.cli import federation as federating  # noqa: F401
        from silotune.cli import partition  # noqa: F401
        from silotune.cli import report as reporting  # noqa: F401
        from silotune.cli import run as running  # noqa: F401
        from silotune.cli import transfer as transferring  # noqa: F401

        code = app(standalone_mode=False, prog_name="silotune")
    except SilotuneError as error:
        _complain(str(error))
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError:  # the help is printed by now
        _complain("missing command")
        sys.exit(2)
    except click.ClickException as error:
        usage = error.ctx.get_usage() if isinstance(error, click.UsageError) and error.ctx else ""
        _complain(f"{error.format_message()} {usage}")
        sys.exit(2)
    except (OSError, MemoryError) as error:  # the disk is full, a folder may not be written
        _complain(str(error) or "out of memory")
        sys.exit(1)
    except RuntimeError as error:
        if "out of memory" not in str(error) and "allocate memory" not in str(error):  # PyTorch's words
            raise
        _complain(f"out of memory; a lower train.batch_size needs less ({str(error).splitlines()[0]})")
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        code = _INTERRUPTED
    if code == _INTERRUPTED:  # typer returns this code for Ctrl-C inside a command
        errors.print("silotune: interrupted; what is finished is kept (run again with --resume)", style="yellow")
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> None:
    """One line, whatever the message quotes."""
    errors.print(f"silotune: {' '.join(message.split())}", style="red", markup=False)
