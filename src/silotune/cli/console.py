"""For all commands: `say`, `console`, `progress_bars`, types of arguments, default run folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressDisplay

if TYPE_CHECKING:
    from silotune.config import Config
    from silotune.runs.engines.base import Progress as RunProgress


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
    """Show progress bars while the context is open.

    Yields:
        A class. `Bar(title, rounds)` adds the bar of one run, and the run calls it as its progress report.
    """
    columns = (
        TextColumn("{task.fields[title]:<12}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with ProgressDisplay(*columns, console=console) as display:

        class Bar(_Bar):
            progress = display

        yield Bar


class _Bar:
    """Progress bar of one run; its unit is one silo's round."""

    progress: ProgressDisplay

    def __init__(self, title: str, rounds: int) -> None:
        self._rounds = rounds
        self._task = self.progress.add_task("loading", total=None, title=title)

    def __call__(self, number: int, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` silos have finished their round `number`; `what` describes the current step."""
        finished = (number - 1) * total + done
        text = f"round {number}/{self._rounds}: {what}"
        self.progress.update(self._task, completed=finished, total=self._rounds * total, description=text)


if TYPE_CHECKING:  # mypy checks here that a bar fits the engines' type
    _: RunProgress = _Bar("", 0)
