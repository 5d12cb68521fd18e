"""`bounded`: Flower's grid for one reply, pulled up to a size, and no further once nobody waits for it.

Flower's grid pulls a reply's pieces until the last one is uploaded, for up to 180 seconds, of any size and number. It
offers no hook there, so the bounded grid is a copy whose client looks at each piece (`HttpGrid._client`, Flower 1.41).
"""

from __future__ import annotations

from copy import copy
from threading import Event, Lock
from typing import Any

from flwr.serverapp import Grid


class ReplyTooLarge(Exception):
    """A reply is larger than any that was asked for."""


class PullAbandoned(Exception):
    """Nobody waits for the reply any more."""


def bounded(grid: Grid, largest: int, abandoned: Event) -> Grid:
    """Return a grid for the pull of one reply, over the same connection.

    Args:
        grid: Flower's; one that is not connected over HTTP is returned as it is, as it holds its messages already.
        largest: bytes of the reply's pieces together.
        abandoned: set when nobody waits for the reply any more; ends the pull with its next piece.
    """
    client = getattr(grid, "_runtime_client", None)
    if client is None:
        return grid
    limited = copy(grid)
    vars(limited)["_client"] = _BoundedClient(client, largest, abandoned)
    return limited


class _BoundedClient:
    """Flower's client, whose `PullObject` raises where the pull should end."""

    def __init__(self, client: Any, largest: int, abandoned: Event) -> None:
        self._client = client
        self._largest = largest
        self._abandoned = abandoned
        self._bytes = 0
        self._lock = Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullObject(self, request: Any) -> Any:  # noqa: N802 (Flower's name)
        """Pull one piece; threads of Flower call this at the same time.

        Raises:
            ReplyTooLarge: there is more than was asked for.
            PullAbandoned: nobody waits for the reply any more.
        """
        if self._abandoned.is_set():
            raise PullAbandoned
        response = self._client.PullObject(request)
        with self._lock:
            self._bytes += len(response.object_content)
            if self._bytes > self._largest:
                raise ReplyTooLarge(f"a reply of more than {self._largest:,} bytes is too large")
        return response
