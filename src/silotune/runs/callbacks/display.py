"""Shows how far a run is: `RoundLines` prints a line a round, `NotebookBar` draws a bar under a notebook's cell."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from silotune.runs.callbacks.base import Callback, RoundEnd

_EVERY = 60.0
"""Seconds after which a line tells how far a round is that has not ended."""

_FEW = 8
"""So many silos are named with their scores; of more, the lowest and the highest score are."""


class RoundLines(Callback):
    """Prints a line a round with scores and the time left, and one a minute within long rounds."""

    def __init__(self, write: Callable[[str], None], title: str, rounds: int, silos: bool = False) -> None:
        self._write = write
        self._title = title
        self._rounds = rounds
        self._silos = silos
        self._time_left = TimeLeft(rounds)
        self._last_line = 0.0

    @override
    def on_progress(self, round: int, what: str, done: int, total: int) -> None:
        self._time_left.start(round)
        if time.monotonic() - self._last_line >= _EVERY:
            self._line(f"round {round}/{self._rounds}: {what} ({done} of {total} silos done)")

    @override
    def on_silo(self, round: int, silo: str, values: Mapping[str, Any]) -> None:
        if self._silos:
            numbers = ", ".join(f"{key} {_number(value)}" for key, value in values.items() if value is not None)
            self._line(f"round {round}/{self._rounds}, silo {silo}: {numbers}")

    @override
    def on_round(self, ended: RoundEnd) -> None:
        if not ended.replayed:
            left = self._time_left.after(ended.round)
            self._line(f"round {ended.round}/{self._rounds}: {scores_text(ended)}{f'; {left}' if left else ''}")

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._write(f"{self._title}: {text}")


class NotebookBar(Callback):
    """Draws a bar with the last round's scores under the cell that runs; it stays there as text."""

    def __init__(self, title: str, rounds: int) -> None:
        from importlib import import_module  # IPython is there wherever a notebook is

        display_module: Any = import_module("IPython.display")
        self._html = display_module.HTML
        self._title = title
        self._rounds = rounds
        self._time_left = TimeLeft(rounds)
        self._scores = ""
        self._shown = ""
        self._share, self._finished = 0.0, False
        self._display = display_module.display(self._html(self._page(0.0, "loading")), display_id=True)

    @override
    def on_progress(self, round: int, what: str, done: int, total: int) -> None:
        self._time_left.start(round)
        self._show((round - 1 + done / max(total, 1)) / max(self._rounds, 1), f"round {round}/{self._rounds}: {what}")

    @override
    def on_round(self, ended: RoundEnd) -> None:
        left = self._time_left.after(ended.round)
        self._scores = f"round {ended.round}: {scores_text(ended)}{f'; {left}' if left else ''}"

    @override
    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._show(1.0, f"{self._rounds} rounds, {duration(float(summary['seconds']))}")
        self._finished = True

    @override
    def close(self) -> None:
        """Close the bar; after an error or an interruption it stays visible and says so."""
        if not self._finished:
            self._show(self._share, "stopped")

    def _show(self, share: float, text: str) -> None:
        self._share = share
        page = self._page(share, text)
        if page != self._shown and self._display is not None:
            self._shown = page
            self._display.update(self._html(page))

    def _page(self, share: float, text: str) -> str:
        bar = f'<progress value="{share:.3f}" max="1" style="width: 20em" aria-label="progress"></progress>'
        lines = f"{bar} {html.escape(text)}" + (
            f"<br><small>{html.escape(self._scores)}</small>" if self._scores else ""
        )
        return f"<div><b>{html.escape(self._title)}</b> {lines}</div>"


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


def scores_text(ended: RoundEnd) -> str:
    """Return a round's validation scores in words: the mean, and each silo's or the range; how long the run is."""
    scores = {silo: score for silo, score in ended.validation.items() if score is not None}
    text = "not judged" if ended.mean is None else f"validation {ended.mean:.2f}"
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
        return [NotebookBar(title, rounds)]
    return [RoundLines(_to_stderr, title, rounds)] if progress else []


def warn_on_stderr(line: str) -> None:
    """Print a warning, where progress is shown."""
    _to_stderr(f"warning: {line}")


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
