"""`RestartPolicy`: whether an ended process may start again: not too often without progress of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class RestartPolicy:
    """Counts how often each process ended since the run's last progress.

    Args:
        limit: the number of ends at which a process is no longer restarted.
        progress: returns how far the run is; a changed value counts as progress.
    """

    def __init__(self, limit: int, progress: Callable[[], object]) -> None:
        self._limit = limit
        self._progress = progress
        self._last = progress()
        self._ends: Counter[str] = Counter()

    def may_restart(self, name: str) -> bool:
        """Count an end of this process; returns whether it may be restarted."""
        progress = self._progress()
        if progress != self._last:
            self._last = progress
            self._ends.clear()
        self._ends[name] += 1
        return self._ends[name] < self._limit
