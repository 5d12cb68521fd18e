"""`AuditedLink`: a link that notes all messages in the audit log, requests before they are sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from silotune.core.chained_log import ChainedLog
from silotune.distributed.flower.link import Arrival, Link
from silotune.distributed.protocol.audit import describe_frame, request_of
from silotune.distributed.protocol.frames import decode


class AuditedLink:
    """A link whose messages are in an audit log.

    Args:
        link: carries the frames.
        record: the audit log of the run.
        run: the run's id.
    """

    def __init__(self, link: Link, record: ChainedLog, run: str) -> None:
        self._link = link
        self._record = record
        self._run = run
        self._sent: dict[str, tuple[int, int | None]] = {}
        """Message → its node and round."""

    @property
    def largest_reply(self) -> int:
        """See `Link`."""
        return self._link.largest_reply

    @largest_reply.setter
    def largest_reply(self, count: int) -> None:
        self._link.largest_reply = count

    def nodes(self) -> Mapping[int, str]:
        """See `Link`."""
        return self._link.nodes()

    def push(self, node: int, data: bytes) -> str | None:
        """See `Link`."""
        frame = decode(data)
        request = request_of(frame)
        self._record.append({"direction": "sent", "node": str(node), **request, **describe_frame(data, frame)})
        message = self._link.push(node, data)
        if message:
            self._sent[message] = node, request["round"]
        return message

    def pull(self, message_ids: Collection[str]) -> Sequence[Arrival]:
        """See `Link`."""
        arrivals = self._link.pull(message_ids)
        for arrival in arrivals:
            node, number = self._sent.pop(arrival.message_id, (None, None))
            came = {"kind": "error", "reason": arrival.error[:500]} if arrival.error else describe_frame(arrival.data)
            self._record.append({"direction": "came", "node": str(node), "run": self._run, "round": number, **came})
        return arrivals
