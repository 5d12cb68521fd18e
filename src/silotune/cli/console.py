"""Printing, and types of arguments and options, that all commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from silotune.cli.completion import complete_source, complete_word
from silotune.errors import InputError

console = Console(highlight=False)

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only results.")]

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also a line for every silo's round, with its losses.")]

LogFile = Annotated[
    Path | None, typer.Option("--log-file", help="Append a line a round to this file, with times.", metavar="FILE")
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value …", metavar="[KEY=VALUE]…", autocompletion=complete_word)
]

Source = Annotated[
    str, typer.Argument(help="A preset or a YAML file.", metavar="PRESET_OR_YAML", autocompletion=complete_source)
]


def say_aside(text: str) -> None:
    """Print a line to stderr, where stdout is JSON."""
    typer.echo(text, err=True)


def say(text: str) -> None:
    """Print a line unchanged: no wrapping (paths stay in one piece), no markup."""
    console.print(text, markup=False, emoji=False, soft_wrap=True)


def output_folder(out: Path | None, command: str) -> Path:
    """Check that the `--out` option is given."""
    if out is None:
        raise InputError(f"--out: is missing; {command} needs a folder for its runs")
    return out
