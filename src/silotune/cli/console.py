"""The console, printed lines and progress bars of the commands, and the arguments that several share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from silotune.config import Config
    from silotune.runs.engines.base import Progress as Report


console = Console(highlight=False)

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value …", metavar="[KEY=VALUE]…")]


def say(text: str) -> None:
    """Print a line unchanged: no wrapping (paths stay in one piece), no markup."""
    console.print(text, markup=False, emoji=False, soft_wrap=True)


def default_folder(source: str, config: Config) -> Path:
    """Return the run folder if the user gives none."""
    return Path("runs") / f"{Path(source).stem}-{config.method.name}-seed{config.seed}"


@contextmanager
def progress_bars() -> Iterator[type[_Bar]]:
    """Show progress bars; yields a class whose `Bar(title, rounds)` is a `Progress` of one run."""
    columns = (
        TextColumn("{task.fields[title]:<12}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as display:

        class Bar(_Bar):
            progress = display

        yield Bar


class _Bar:
    """Progress bar of one run; its unit is one silo's round."""

    progress: Progress

    def __init__(self, title: str, rounds: int) -> None:
        self._rounds = rounds
        self._task = self.progress.add_task("loading", total=None, title=title)

    def __call__(self, number: int, what: str, done: int, total: int) -> None:
        finished = (number - 1) * total + done
        text = f"round {number}/{self._rounds}: {what}"
        self.progress.update(self._task, completed=finished, total=self._rounds * total, description=text)


if TYPE_CHECKING:
    _: Report = _Bar("", 0)
