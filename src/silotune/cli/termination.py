"""End a run in order on SIGTERM, as on Ctrl-C, and tell the two apart."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_received: list[int] = []


def was_terminated() -> bool:
    """Return whether a SIGTERM ended this process's command."""
    return bool(_received)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGTERM while the context is open; only the main thread can."""
    _received.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        _received.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut what the first began
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
