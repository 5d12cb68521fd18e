"""End a command in order on SIGTERM, as on Ctrl-C, and remember which of the two came."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

interruptions: list[int] = []
"""The signals that asked this process's command to end. The error that ends it then does not tell: a module that is
interrupted while it is imported may raise another one, such as NumPy's RecursionError."""


def interrupt(number: int, _frame: FrameType | None) -> None:
    """Handle a signal as Python handles Ctrl-C, and remember it."""
    interruptions.append(number)
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_IGN)  # a second one must not cut what the first began
    raise KeyboardInterrupt


@contextmanager
def until_interrupted() -> Iterator[None]:
    """End the block on Ctrl-C or SIGTERM, which is then dealt with: an error after it is one of its own."""
    try:
        yield
    except KeyboardInterrupt:
        interruptions.clear()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGTERM while the context is open; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
