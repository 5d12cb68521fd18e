"""`Connections`: a worker's open connections; bounds their number and the bytes of requests, closes those that idle."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from silotune.distributed.protocol.frames import ProtocolError

MOST = 16
"""Connections at once. Flower's node has one for every message that is under way, and tools ping."""

_SAY_AGAIN = 60.0
"""Seconds between two log lines about too many connections."""


class Connections:
    """Counts connections in threads; the node that opens them runs what the coordinator sends.

    Args:
        largest: bytes that all requests together may hold while they are read or wait.
        say: writes a line to the worker's log.
        most: connections at once.
    """

    def __init__(self, largest: int, say: Callable[[str], None], most: int = MOST) -> None:
        self._largest, self._say, self._most = largest, say, most
        self._lock = threading.Lock()
        self._idle: dict[socket.socket, None] = {}  # those that have not sent their request yet, oldest first
        self._bytes: dict[socket.socket, int] = {}  # all, with the length of their request
        self._said = float("-inf")

    def admit(self, connection: socket.socket) -> bool:
        """Take in a connection; where there are too many, the oldest that has sent no request is closed for it.

        Returns:
            Whether it is taken. It is closed if all others have a request that is worked on.
        """
        with self._lock:
            if full := len(self._bytes) >= self._most:
                oldest = next(iter(self._idle), None)
                self._tell(oldest is not None)
                if oldest is not None:
                    self._forget(oldest)
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end
                full = oldest is None
            if not full:
                self._idle[connection], self._bytes[connection] = None, 0
        if full:
            connection.close()
        return not full

    def claim(self, connection: socket.socket, length: int) -> None:
        """Set room aside for a request that is about to be read.

        Raises:
            ProtocolError: the requests that are read or wait leave no room.
        """
        with self._lock:
            if sum(self._bytes.values()) + length > self._largest:
                raise ProtocolError(f"a request of {length:,} bytes beside others that wait is too much")
            self._bytes[connection] = length

    def received(self, connection: socket.socket) -> None:
        """Note that a request is read: its connection waits for a reply and does not idle."""
        with self._lock:
            self._idle.pop(connection, None)

    def holds(self, connection: socket.socket) -> bool:
        """Return whether a connection was not closed to make room."""
        with self._lock:
            return connection in self._bytes

    def ended(self, connection: socket.socket) -> None:
        """Forget a connection."""
        with self._lock:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._idle.pop(connection, None)
        self._bytes.pop(connection, None)

    def _tell(self, closed_oldest: bool) -> None:
        if time.monotonic() - self._said >= _SAY_AGAIN:
            self._said = time.monotonic()
            what = "the one that idles longest" if closed_oldest else "the new one, as all others wait for replies"
            self._say(f"more than {self._most} connections: closes {what} (said at most once a minute)")


def hung_up(connection: socket.socket) -> bool:
    """Return whether the other end of a connection is gone; its next bytes, if any, stay to be read.

    The connection does not block afterwards: with a timeout, `recv` would wait, and time out as if the peer were lost.
    """
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
