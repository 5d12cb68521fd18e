"""Show the progress of commands: bars on a terminal, lines elsewhere, and a log file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress
from typing_extensions import override

from silotune.cli.console import console, say
from silotune.cli.termination import ended_by_sigterm, interruptions
from silotune.core.clock import utc_now
from silotune.errors import InputError, file_errors
from silotune.runs.callbacks import Callback
from silotune.runs.callbacks.display import RoundLines, RunBar, new_bars


@dataclass
class Followers:
    """Makes a run's progress display and line printers, by `followers(title, rounds)`; `silos`: also one for each."""

    bars: Progress | None
    lines: list[Callable[[str], None]]
    silos: bool

    def __call__(self, title: str, rounds: int) -> Sequence[Callback]:
        """Return the callbacks of one run."""
        bars = [] if self.bars is None else [RunBar(self.bars, title, rounds)]
        return [_Ending(), *bars, *(RoundLines(write, title, rounds, self.silos) for write in self.lines)]

    def clear(self) -> None:
        """Remove the bars of runs that are over."""
        if self.bars is not None:
            for task in self.bars.task_ids:
                self.bars.remove_task(task)


class _Ending(Callback):
    """Ends a run that goes on after Ctrl-C or SIGTERM, because a library dropped the error that they raise."""

    @override
    def on_progress(self, round: int, what: str, done: int, total: int) -> None:
        if interruptions:
            raise KeyboardInterrupt


@contextmanager
def show_progress(
    quiet: bool = False, verbose: bool = False, log_file: Path | None = None, write: Callable[[str], None] = say
) -> Iterator[Followers]:
    """Show the progress of runs while the context is open, and append it to a log file, also where it is `quiet`.

    `write` prints a line; where it is not `say`, there are no bars.
    """
    if quiet and verbose:
        raise InputError("--quiet: does not go with --verbose")
    with ended_by_sigterm(), ExitStack() as stack:
        bars = stack.enter_context(new_bars(console)) if console.is_terminal and not quiet and write is say else None
        lines = [write] if not quiet and (verbose or bars is None) else []
        if log_file is not None:
            with file_errors(f"--log-file {log_file}: cannot be written"):
                log = stack.enter_context(log_file.open("a", encoding="utf-8", buffering=1))
            lines.append(lambda line: print(utc_now(), line, file=log))
        yield Followers(bars, lines, verbose)
