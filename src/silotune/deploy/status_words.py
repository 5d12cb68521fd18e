"""What a status says in words, on a terminal or a page: `busy`, `size` of a disk, `short_time`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def busy(state: Mapping[str, Any] | None) -> str | None:
    """Return what a silo is busy with in words; None if that is not known."""
    if state is None or state["state"] == "idle":
        return None if state is None else "idle"
    if state["state"] != "working":
        return f"run {state['run']}: {state['state']}"
    return f"run {state['run']}, round {state['round']}: {state['kind']} since {state['since'][11:19]}"


def size(count: int | None) -> str:
    """Return bytes in words, e.g. `12.3 GiB`; a dash if they are not known."""
    return "–" if count is None else f"{count / 2**30:.1f} GiB"


def short_time(time: str) -> str:
    """Return a time in ISO format to the second, e.g. `2026-01-02 03:04:05`."""
    return time[:19].replace("T", " ")
