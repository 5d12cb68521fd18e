"""The command line. Bad input ends with one line and exit code 2; `Ctrl-C` with 130."""

from __future__ import annotations

import sys
from typing import Annotated

import click
import typer
from rich.console import Console

from silotune.errors import SilotuneError

app = typer.Typer(
    name="silotune",
    help="Federated parameter-efficient fine-tuning of language models across data silos.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point of `silotune`."""
    from silotune.cli import catalogue, running  # noqa: F401  (they register their commands)

    try:
        code = app(standalone_mode=False)
    except SilotuneError as error:
        errors.print(f"silotune: {error}", style="red", markup=False)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        errors.print(f"silotune: {error.format_message()}", style="red", markup=False)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        errors.print("silotune: interrupted; what is finished is kept (run again with --resume)", style="yellow")
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from silotune import __version__

        typer.echo(__version__)
        raise typer.Exit
