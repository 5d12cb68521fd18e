"""Shows how far a run is: `RoundLines` prints a line a round, `RunBar` draws a bar on a terminal or in a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from silotune.runs.callbacks.base import Callback, RoundEnd

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_EVERY = 60.0
"""Seconds after which a line tells how far a round is that has not ended."""

_FEW = 8
"""So many silos are named with their scores; of more, the lowest and the highest score are."""


class _Rounds(Callback):
    """Knows a run's rounds and the time left, for those that show them."""

    def __init__(self, title: str, rounds: int) -> None:
        self._title = title
        self._rounds = rounds
        self._time_left = TimeLeft(rounds)

    @override
    def on_progress(self, round: int, what: str, done: int, total: int) -> None:
        self._time_left.start(round)

    def _and_time_left(self, text: str, ended: RoundEnd) -> str:
        estimate = self._time_left.after(ended.round)
        return f"{text}; {estimate}" if estimate else text


class RoundLines(_Rounds):
    """Prints a line a round with scores and the time left, and one a minute within long rounds.

    Args:
        write: prints a line.
        title: what each line begins with.
        rounds: of the run.
        silos: print a line for each silo's round, too.
        replayed: print rounds that ended before, too.
    """

    def __init__(
        self, write: Callable[[str], None], title: str, rounds: int, silos: bool = False, replayed: bool = False
    ) -> None:
        super().__init__(title, rounds)
        self._write = write
        self._silos = silos
        self._replayed = replayed
        self._last_line = 0.0

    @override
    def on_progress(self, round: int, what: str, done: int, total: int) -> None:
        super().on_progress(round, what, done, total)
        if time.monotonic() - self._last_line >= _EVERY:
            self._line(f"round {round}/{self._rounds}: {what} ({done} of {total} silos done)")

    @override
    def on_silo(self, round: int, silo: str, values: Mapping[str, Any]) -> None:
        if self._silos:
            numbers = ", ".join(f"{key} {_number(value)}" for key, value in values.items() if value is not None)
            self._line(f"round {round}/{self._rounds}, silo {silo}: {numbers}")

    @override
    def on_round(self, ended: RoundEnd) -> None:
        if self._replayed or not ended.replayed:
            self._line(f"round {ended.round}/{self._rounds}: {self._and_time_left(scores_text(ended), ended)}")

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._write(f"{self._title}: {text}")


def new_bars(console: Console) -> Progress:
    """Return an empty set of bars, one for each run; as a context it draws them on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    title, text = (TextColumn(form, markup=False) for form in ("{task.fields[title]:<12}", "{task.description}"))
    return Progress(title, BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), text, console=console)


class RunBar(_Rounds):
    """Draws a run's bar: its rounds, the work at hand, and the scores of the last round.

    Args:
        bars: the set to which the bar is added.
        title: what stands before the bar.
        rounds: of the run.
        redraw: called after each change, where the set does not draw itself.
    """

    def __init__(self, bars: Progress, title: str, rounds: int, redraw: Callable[[], object] = lambda: None) -> None:
        super().__init__(title, rounds)
        self._bars = bars
        self._redraw = redraw
        self._task = bars.add_task("loading", total=rounds, title=title)
        self._scores = ""

    @override
    def on_progress(self, round: int, what: str, done: int, total: int) -> None:
        super().on_progress(round, what, done, total)
        self._show(round - 1 + done / max(total, 1), f"{what}{self._scores}")

    @override
    def on_round(self, ended: RoundEnd) -> None:
        scores = self._and_time_left(_mean_text(ended), ended)
        self._scores = f"; {scores}"
        self._show(ended.round, scores)

    @override
    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._show(self._rounds, f"done{self._scores}")

    def _show(self, rounds: float, text: str) -> None:
        self._bars.update(self._task, completed=rounds, description=text)
        self._redraw()


def _notebook_bar(title: str, rounds: int) -> RunBar:
    """Draw a bar under the cell that runs; it stays there as text."""
    from importlib import import_module  # IPython is there wherever a notebook is

    from rich.console import Console

    bars = new_bars(Console())
    handle = import_module("IPython.display").display(bars, display_id=True)
    return RunBar(bars, title, rounds, lambda: handle.update(bars))


class TimeLeft:
    """Estimates the time left from the rounds that this process ran."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._first = 0  # the first round of this process
        self._started = 0.0

    def start(self, number: int) -> None:
        """Note the first round's start; later calls change nothing."""
        if not self._first and number:
            self._first, self._started = number, time.monotonic()

    def after(self, number: int) -> str:
        """Return the time left after this round has ended, as text; empty after the last round.

        Also empty before the first round that was seen, because a federation reports a round after the next began.
        """
        if not self._first or not self._first <= number < self._rounds:
            return ""
        per_round = (time.monotonic() - self._started) / (number - self._first + 1)
        return f"about {duration(per_round * (self._rounds - number))} left"


def _mean_text(ended: RoundEnd) -> str:
    return "not judged" if ended.mean is None else f"validation {ended.mean:.2f}"


def scores_text(ended: RoundEnd) -> str:
    """Return a round's validation scores in words: the mean, and each silo's or the range; how long the run is."""
    scores = {silo: score for silo, score in ended.validation.items() if score is not None}
    text = _mean_text(ended)
    if 1 < len(scores) <= _FEW:
        text += f" ({', '.join(f'{silo} {score:.2f}' for silo, score in scores.items())})"
    elif scores and len(scores) > _FEW:
        text += f" ({min(scores.values()):.2f} to {max(scores.values()):.2f} over {len(scores)} silos)"
    return f"{text}, {duration(ended.seconds)}"


def duration(seconds: float) -> str:
    """Return seconds as text: `42 s`, `3 min 20 s` or `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")


def default_display(progress: bool | None, title: str, rounds: int) -> Sequence[Callback]:
    """Return the callback that shows a run's progress to users of Python; `progress` as of `run`."""
    if progress is False:
        return []
    if in_notebook():
        return [_notebook_bar(title, rounds)]
    return [RoundLines(_to_stderr, title, rounds)] if progress else []


def warn_on_stderr(line: str) -> None:
    """Print a warning, where progress is shown."""
    _to_stderr(f"warning: {line}")


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
