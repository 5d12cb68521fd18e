"""`measured` and `stage`: seconds that each stage of a run took (import, data, training, …), each counted once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")

STAGES = ("import", "start", "data", "backbone", "tokenization", "training", "scoring", "writing", "other")
"""All stages, in the order of a summary. `start` is that of other processes; `other` is what no stage counts."""

_command_started: float | None = None


class Stages:
    """Seconds by stage. While a stage runs inside another one, only the inner one counts."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._open = ["other"]
        self._since = time.perf_counter()

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that passed elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def begin(self, name: str) -> None:
        """Begin a stage; the one that runs waits until it ends."""
        self._count()
        self._open.append(name)

    def end(self) -> None:
        """End the stage that was begun last."""
        self._count()
        self._open.pop()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage so far, in milliseconds' precision, and `total`."""
        self._count()
        known = {name: round(self._seconds[name], 3) for name in STAGES if name in self._seconds}
        return known | {"total": round(sum(self._seconds.values()), 3)}

    def _count(self) -> None:
        now = time.perf_counter()
        self.add(self._open[-1], now - self._since)
        self._since = now


_current: ContextVar[Stages | None] = ContextVar("stages", default=None)


def note_command_start() -> None:
    """Say that a command starts now: what passes until its first run begins is that run's stage `import`."""
    global _command_started
    _command_started = time.perf_counter()


@contextmanager
def measured() -> Iterator[Stages]:
    """Measure the stages of one run; inside another measurement, that one goes on after this block."""
    global _command_started
    stages = Stages()
    if _command_started is not None:
        stages.add("import", time.perf_counter() - _command_started)
        _command_started = None
    token = _current.set(stages)
    try:
        yield stages
    finally:
        _current.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count the block's seconds to a stage of the run that is measured, if one is."""
    stages = _current.get()
    if stages is None:
        yield
        return
    stages.begin(name)
    try:
        yield
    finally:
        stages.end()


def waiting_for(items: Iterable[Item], name: str) -> Iterator[Item]:
    """Yield items; the seconds until each comes count to a stage, what is done with it does not."""
    iterator = iter(items)
    while True:
        with stage(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def seconds_so_far() -> dict[str, float]:
    """Return the seconds by stage of the run that is measured; empty if none is."""
    stages = _current.get()
    return {} if stages is None else stages.seconds()


def described(seconds: dict[str, float]) -> str:
    """Return a summary's stages as a line: `12.3 s: import 4.1, training 6.0, …`; stages below 0.05 s are left out."""
    parts = [f"{name} {value:.1f}" for name, value in seconds.items() if name != "total" and value >= 0.05]
    return f"{seconds['total']:.1f} s: {', '.join(parts)}" if parts else f"{seconds['total']:.1f} s"
