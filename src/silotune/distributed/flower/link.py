"""How the coordinator reaches silos: messages to nodes, and answers that come when they come."""

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
def _lost() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of httpx, of Flower, of its retries
        raise ConnectionLost(f"Flower: {type(error).__name__}: {str(error)[:200]} (run again with --resume)") from error


@dataclass(frozen=True)
class Arrival:
    """What came for a message: a frame's bytes, or why there are none."""

    message: str
    data: bytes = b""
    error: str = ""


class ConnectionLost(SilotuneError):
    """Flower cannot be reached, or has given the run up. What is finished is kept."""


class Link(Protocol):
    """What carries frames."""

    def nodes(self) -> Mapping[int, str]:
        """The nodes that are connected: id → the name under which the node's key is registered, or nothing."""

    def push(self, node: int, data: bytes) -> str | None:
        """Send a frame; the message's id, None if it could not be sent."""

    def pull(self, messages: Collection[str]) -> Sequence[Arrival]:
        """What has come for these messages since the last call."""


class FlowerLink:
    """Over Flower's grid.

    Args:
        grid: the ServerApp's.
        ttl: seconds after which Flower drops a message.
    """

    def __init__(self, grid: Grid, ttl: float) -> None:
        self._grid = grid
        self._ttl = ttl

    def nodes(self) -> Mapping[int, str]:
        """See `Link`."""
        with _lost():
            return {int(node.node_id): str(node.name) for node in self._grid.get_nodes()}

    def push(self, node: int, data: bytes) -> str | None:
        """See `Link`."""
        message = Message(wrap(data), node, MessageType.QUERY, ttl=self._ttl)
        with _lost():
            sent = list(self._grid.push_messages([message]))
        return sent[0] or None if sent else None

    def pull(self, messages: Collection[str]) -> Sequence[Arrival]:
        """See `Link`. Answers are matched by the message they reply to: Flower's own errors name no node."""
        if not messages:
            return []
        found = []
        with _lost():
            replies = list(self._grid.pull_messages(list(messages)))
        for reply in replies:
            asked = reply.metadata.reply_to_message_id
            if reply.has_error():
                found.append(
                    Arrival(asked, error=f"Flower's error {reply.error.code}: {str(reply.error.reason)[:120]}")
                )
                continue
            try:
                found.append(Arrival(asked, unwrap(reply)))
            except ProtocolError as error:
                found.append(Arrival(asked, error=str(error)))
        return found
