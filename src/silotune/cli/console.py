"""Printing, completion in a shell, and types of arguments and options, that all commands share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

console = Console(highlight=False)


def complete_source(incomplete: str) -> list[str]:
    """Return the presets and YAML files that begin so."""
    from silotune.config import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)] + _paths(incomplete, "*.yaml")


def complete_key(incomplete: str) -> list[str]:
    """Return the keys and sections that begin so."""
    from silotune.config.reference import all_keys, sections

    return [name for name in (*filter(None, sections()), *all_keys()) if name.startswith(incomplete)]


def complete_word(incomplete: str) -> list[str]:
    """Return `key=` of the keys that begin so, and the methods after `method=`."""
    from silotune.config.reference import all_keys
    from silotune.config.registries import METHODS, TUNERS

    for section, registry in (("method", METHODS), ("tuner", TUNERS)):
        if incomplete.startswith(f"{section}="):
            return [word for name in registry if (word := f"{section}={name}").startswith(incomplete)]
    return [word for name in all_keys() if (word := f"{name}=").startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Return the run folders and folders of runs that begin so."""
    return [path for path in _paths(incomplete, "*") if Path(path).is_dir()]


def _paths(incomplete: str, pattern: str) -> list[str]:
    parent = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    return [str(path) for path in sorted(parent.glob(pattern)) if str(path).startswith(incomplete)]


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only results.")]

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also a line for every silo's round, with its losses.")]

LogFile = Annotated[
    Path | None, typer.Option("--log-file", help="Append a line a round to this file, with times.", metavar="FILE")
]

PrecisionOption = Annotated[
    str | None, typer.Option("--precision", help="Load the backbone in this precision instead of the run's: fp32, …")
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value …", metavar="[KEY=VALUE]…", autocompletion=complete_word)
]

Source = Annotated[
    str, typer.Argument(help="A preset or a YAML file.", metavar="PRESET_OR_YAML", autocompletion=complete_source)
]


def new_table(title: str | None, texts: Iterable[str], numbers: Iterable[str] = ()) -> Table:
    """Make a table with columns of texts, and behind them columns of numbers."""
    table = Table(*texts, title=title)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def say_aside(text: str) -> None:
    """Print a line to stderr, where stdout is JSON."""
    typer.echo(text, err=True)


def say(text: str) -> None:
    """Print a line unchanged: no wrapping (paths stay in one piece), no markup."""
    console.print(text, markup=False, emoji=False, soft_wrap=True)
