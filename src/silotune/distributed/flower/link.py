"""`FlowerLink`, the coordinator's connection to silos' nodes: sends frames and collects replies without waiting.

A *node* is Flower's word for the SuperNode of a silo. The dispatcher polls the link.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from silotune.distributed.flower.frame_message import unwrap, wrap
from silotune.distributed.protocol.frames import ProtocolError
from silotune.errors import SilotuneError


@contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # httpx, Flower and its retries raise errors without a common class
        raise ConnectionLost(f"Flower: {type(error).__name__}: {str(error)[:200]} (run again with --resume)") from error


@dataclass(frozen=True)
class Arrival:
    """The reply to a message: a frame's bytes, or an error.

    Args:
        message_id: the id of the message that was replied to.
        data: the reply's frame.
        error: the reason if there is no frame.
    """

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


class FlowerLink:
    """A link over Flower's grid.

    Args:
        grid: the grid that Flower gives the ServerApp.
        ttl: seconds after which Flower drops a message that was not fetched.
    """

    def __init__(self, grid: Grid, ttl: float) -> None:
        self._grid = grid
        self._ttl = ttl

    def nodes(self) -> Mapping[int, str]:
        """See `Link`."""
        with _connection_errors():
            return {int(node.node_id): str(node.name) for node in self._grid.get_nodes()}

    def push(self, node: int, data: bytes) -> str | None:
        """See `Link`."""
        message = Message(wrap(data), node, MessageType.QUERY, ttl=self._ttl)
        with _connection_errors():
            sent = list(self._grid.push_messages([message]))
        return sent[0] or None if sent else None

    def pull(self, message_ids: Collection[str]) -> Sequence[Arrival]:
        """See `Link`. Replies are matched by message id, because Flower's own errors name no node."""
        if not message_ids:
            return []
        arrivals = []
        with _connection_errors():
            replies = list(self._grid.pull_messages(list(message_ids)))
        for reply in replies:
            message_id = reply.metadata.reply_to_message_id
            if reply.has_error():
                arrivals.append(
                    Arrival(message_id, error=f"Flower's error {reply.error.code}: {str(reply.error.reason)[:120]}")
                )
                continue
            try:
                arrivals.append(Arrival(message_id, unwrap(reply)))
            except ProtocolError as error:
                arrivals.append(Arrival(message_id, error=str(error)))
        return arrivals
