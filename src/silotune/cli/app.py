"""`app`, the typer application in which other modules register commands; suggests names for unknown ones."""

from __future__ import annotations

from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from silotune.errors import unknown_name_error

TRAIN = "Train and compare"
BEFORE = "Before a run"
RESULTS = "Results and models"
FEDERATION = "A federation on several machines"
"""The groups of commands in the help."""


class _Commands(TyperGroup):
    """Command group that answers an unknown command with the available ones."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None:
            raise unknown_name_error("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    name="silotune",
    help="Federated parameter-efficient fine-tuning of language models across data silos.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False) -> None:
    if version:
        from silotune.version import __version__

        typer.echo(__version__)
        raise typer.Exit
