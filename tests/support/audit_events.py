"""Python's audit events for tests, through one hook: it stays for the process's life and slows down every event."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

Listener = Callable[[str, tuple[Any, ...]], None]

_listeners: list[Listener] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    for listener in _listeners:
        listener(event, args)


@cache
def _install() -> None:
    """Add the hook when a test first needs it."""
    sys.addaudithook(_hook)


@contextmanager
def audited(listener: Listener) -> Iterator[None]:
    """Call a listener with every event while the block runs."""
    _install()
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
