"""Pushes frames to silos' nodes and pulls their replies, without waiting, over Flower's grid.

A *node* is Flower's word for the SuperNode of a silo. The dispatcher polls the link.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Protocol

from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from typing_extensions import override

from silotune.distributed.flower.quick import pause
from silotune.distributed.protocol.frames import ProtocolError
from silotune.errors import SilotuneError

if TYPE_CHECKING:  # a ClientApp, which starts anew for every message, imports this module without it
    from flwr.serverapp import Grid

PULL_INTERVAL, LONGEST_PULL_INTERVAL = 0.1, 1.0
"""Seconds between polls for the reply to a message: at first, and once it has been waited for so long."""

PULLS_PER_SECOND = 100.0
"""Most polls a second, over all messages."""

TTL = 7 * 24 * 3600.0
"""Seconds after which Flower drops a message that was not fetched."""

_RECORD, _ARRAY = "silotune", "frame"


def wrap(data: bytes) -> RecordDict:
    """Wrap a frame's bytes as the content of a Flower message."""
    array = Array(dtype="uint8", shape=(len(data),), stype="silotune.frame", data=data)
    return RecordDict({_RECORD: ArrayRecord({_ARRAY: array})})


def unwrap(message: Message) -> bytes:
    """Return the bytes of a message's frame."""
    content = message.content
    record = content.array_records.get(_RECORD)
    if record is None or _ARRAY not in record:
        raise ProtocolError("a message without a frame")
    return bytes(record[_ARRAY].data)


@contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # httpx, Flower and its retries raise errors without a common class
        raise ConnectionLost(f"Flower: {type(error).__name__}: {str(error)[:200]} (run again with --resume)") from error


@dataclass(frozen=True)
class Arrival:
    """The reply to a message: a frame's bytes, or an error."""

    message_id: str
    data: bytes = b""
    error: str = ""


class ConnectionLost(SilotuneError):
    """Flower cannot be reached or has stopped the run; finished rounds are kept."""


class Link(Protocol):
    """Carries frames between the coordinator and nodes."""

    def nodes(self) -> Mapping[int, str]:
        """Return the connected nodes: id → name under which the node's key is registered; empty if it has none."""

    def push(self, node: int, data: bytes) -> str | None:
        """Send a frame; returns the message's id, None if it could not be sent."""

    def pull(self, message_ids: Collection[str]) -> Sequence[Arrival]:
        """Return the replies to the messages with these ids that arrived since the last call."""


class FlowerLink(Link):
    """A link over Flower's grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._pulls: dict[str, _Pull] = {}

    @override
    def nodes(self) -> Mapping[int, str]:
        with _connection_errors():
            return {int(node.node_id): str(node.name) for node in self._grid.get_nodes()}

    @override
    def push(self, node: int, data: bytes) -> str | None:
        message = Message(wrap(data), node, MessageType.QUERY, ttl=TTL)
        with _connection_errors():
            ids = list(self._grid.push_messages([message]))
        return ids[0] or None if ids else None

    @override
    def pull(self, message_ids: Collection[str]) -> Sequence[Arrival]:
        """Pull each reply separately, so that a reply that is never uploaded delays no other."""
        for message_id in set(self._pulls) - set(message_ids):
            self._pulls.pop(message_id).abandoned.set()
        for message_id in message_ids:
            if message_id not in self._pulls:
                self._pulls[message_id] = _Pull(self._grid, message_id)
        interval = max(PULL_INTERVAL, len(self._pulls) / PULLS_PER_SECOND)
        for pull in self._pulls.values():
            pull.interval = interval
        finished = [message_id for message_id, pull in self._pulls.items() if not pull.is_alive()]
        return [self._arrival(message_id, self._pulls.pop(message_id)) for message_id in finished]

    def _arrival(self, message_id: str, pull: _Pull) -> Arrival:
        """Return the result of a finished pull."""
        if pull.error is not None:
            self.nodes()
            return Arrival(message_id, error=f"unreadable reply ({type(pull.error).__name__}: {str(pull.error)[:120]})")
        assert pull.reply is not None
        if pull.reply.has_error():
            error = pull.reply.error
            return Arrival(message_id, error=f"Flower's error {error.code}: {str(error.reason)[:120]}")
        try:
            return Arrival(message_id, unwrap(pull.reply))
        except ProtocolError as error:
            return Arrival(message_id, error=str(error))


class _Pull(Thread):
    """Polls for the reply to one message, which Flower returns when all is uploaded, at most 180 s after the start."""

    def __init__(self, grid: Grid, message_id: str) -> None:
        super().__init__(name=f"pull {message_id[:8]}", daemon=True)
        self.interval = PULL_INTERVAL
        self.reply: Message | None = None
        self.error: Exception | None = None
        self._message_id = message_id
        self.abandoned = Event()
        self._grid = grid
        self.start()

    def run(self) -> None:
        """Poll until the reply is there, or polling fails."""
        began = time.monotonic()
        try:
            while not self.abandoned.is_set():
                # Flower's own errors name no node, so replies are told apart by the message's id
                replies = list(self._grid.pull_messages([self._message_id]))
                if replies:
                    self.reply = replies[0]
                    return
                self.abandoned.wait(pause(time.monotonic() - began, self.interval, LONGEST_PULL_INTERVAL))
        except Exception as error:  # httpx, Flower and its retries raise errors without a common class
            self.error = error
