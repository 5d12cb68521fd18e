"""When to give up starting again what ends: a rare crash in a long run is none, six in a row are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class RestartPolicy:
    """Counts how often things ended since the run last came further.

    Args:
        most: how often one thing may end without that.
        reached: how far the run is; another value than before is progress.
    """

    def __init__(self, most: int, reached: Callable[[], object]) -> None:
        self._most = most
        self._reached = reached
        self._then = reached()
        self._ended: Counter[str] = Counter()

    def ended(self, name: str) -> bool:
        """Take down that something ended; whether it may be started again."""
        now = self._reached()
        if now != self._then:
            self._then = now
            self._ended.clear()
        self._ended[name] += 1
        return self._ended[name] < self._most
