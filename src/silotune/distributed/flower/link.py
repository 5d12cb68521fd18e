"""The coordinator's connection to nodes: sends messages and collects replies without waiting."""

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
    except Exception as error:  # of httpx, of Flower, of its retries
        raise ConnectionLost(f"Flower: {type(error).__name__}: {str(error)[:200]} (run again with --resume)") from error


@dataclass(frozen=True)
class Arrival:
    """The reply to a message: a frame's bytes, or an error."""

    message: str
    data: bytes = b""
    error: str = ""


class ConnectionLost(SilotuneError):
    """Flower cannot be reached or has stopped the run; finished rounds are kept."""


class Link(Protocol):
    """Carries frames between the coordinator and nodes."""

    def nodes(self) -> Mapping[int, str]:
        """Return the connected nodes: id → the name under which the node's key is registered, or an empty text."""

    def push(self, node: int, data: bytes) -> str | None:
        """Send a frame; returns the message's id, None if it could not be sent."""

    def pull(self, messages: Collection[str]) -> Sequence[Arrival]:
        """Return the replies to these messages that arrived since the last call."""


class FlowerLink:
    """A link over Flower's grid.

    Args:
        grid: the ServerApp's.
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

    def pull(self, messages: Collection[str]) -> Sequence[Arrival]:
        """See `Link`. Replies are matched by message id, because Flower's own errors name no node."""
        if not messages:
            return []
        arrivals = []
        with _connection_errors():
            replies = list(self._grid.pull_messages(list(messages)))
        for reply in replies:
            message = reply.metadata.reply_to_message_id
            if reply.has_error():
                arrivals.append(
                    Arrival(message, error=f"Flower's error {reply.error.code}: {str(reply.error.reason)[:120]}")
                )
                continue
            try:
                arrivals.append(Arrival(message, unwrap(reply)))
            except ProtocolError as error:
                arrivals.append(Arrival(message, error=str(error)))
        return arrivals
