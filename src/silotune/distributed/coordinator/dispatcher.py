"""Sends requests to silos by name over a link, records all messages, and yields the replies until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from silotune.distributed.coordinator.run_status import RunStatus
from silotune.distributed.flower.link import Arrival, Link
from silotune.distributed.protocol.frames import (
    Frame,
    HandshakeRefused,
    ProtocolError,
    decode,
    describe_frame,
    printable,
    request_of,
)

POLL_INTERVAL = 0.02
"""Seconds between looks whether replies are there, which the link polls for."""

NODES_INTERVAL = 1.0
"""Seconds between updates of the connected nodes."""

RETRY_DELAY = 2.0
"""Seconds before a request is repeated that could not be sent or answered."""

APPROVAL_INTERVAL, LONGEST_APPROVAL_INTERVAL = 5.0, 60.0
"""Seconds before a silo is asked again whose operator has not approved the run: a tenth of its wait, within these."""

LONGEST_REASON = 1000
"""Characters of a silo's reason that are kept; reasons go to logs, events and terminals."""

_NEVER = float("inf")


Report = Callable[[str, str], None]
"""Called with (silo or node, event)."""


@dataclass
class _PendingRequest:
    """A request without a reply yet: silo (empty for a greeting), node, and the time when it was sent."""

    silo: str
    node: int
    since: float
    round: int | None = None

    @property
    def greeting(self) -> bool:
        return not self.silo


@dataclass
class SiloDispatcher:
    """Sends requests to silos by name; a silo's node may change during a run.

    Args:
        silos: names of all silos; others are refused.
        greeting: asks a node for its hello.
        admit: checks the reply to a greeting; raises HandshakeRefused to refuse the node. Before round 1 a refusal ends
            the run, later it excludes the node.
        patience: seconds after which an unanswered request is sent again. They double with each repetition, because a
            silo that was only busy answers every copy. Nodes without a hello are greeted again after the same time.
        record: called with the fields of each message's line in the audit log.
    """

    link: Link
    silos: Sequence[str]
    greeting: Frame
    admit: Callable[[Frame], None]
    report: Report = lambda *_: None
    patience: float = 120.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    status: RunStatus = field(default_factory=RunStatus)
    record: Callable[[Mapping[str, Any]], None] = lambda _: None
    _nodes: dict[str, int] = field(default_factory=dict)
    """The newest node of each silo that was let in."""
    _greet_at: dict[int, float] = field(default_factory=dict)
    """Time at which a node is greeted next; never after its silo was registered."""
    _refused: set[tuple[int, str]] = field(default_factory=set)
    """(node, reason) of refusals, so that each is reported once."""
    _approval_since: dict[int, float] = field(default_factory=dict)
    """Node → the time when it first said that its operator has to approve the run."""
    _pending: dict[str, _PendingRequest] = field(default_factory=dict)
    _online: Mapping[int, str] = field(default_factory=dict)
    _nodes_updated: float = float("-inf")
    _strict: bool = True

    def wait_for_all(self, deadline: float, members: Collection[str] = (), away: float = 0.0) -> list[str]:
        """Wait until all silos are registered, without end for those whose operators have to approve the run.

        Returns the silos that are absent in the end.

        Args:
            deadline: seconds for the others.
            members: silos that took part before the run was interrupted; they may come back during a round.
            away: seconds to wait for members if they alone are missing.
        """
        began = self.clock()
        self._strict = True
        while missing := [name for name in self.silos if name not in self._nodes]:
            absent = [name for name in missing if not self.status.waits(name)]
            new = not set(absent) <= set(members)
            if (new or absent == missing) and self.clock() >= began + (deadline if new else min(away, deadline)):
                return absent
            self._update_nodes()
            for answered in self._pull():
                self._handle(*answered, {})
            self.sleep(POLL_INTERVAL)
        return []

    def request(self, requests: Mapping[str, Frame], deadline: float, away: float = float("inf")) -> Iterator[Frame]:
        """Send requests to silos and yield their replies as they arrive, until all replied or the deadline passed.

        A silo that is not connected, or whose worker is not, gets its request when it is back. Late replies are
        dropped.

        Args:
            requests: silo → its request.
            deadline: seconds for all silos.
            away: seconds after which a silo that is not connected is given up.
        """
        began = self.clock()
        until = began + deadline
        times = dict.fromkeys(requests, began)
        self._strict = False
        waiting: dict[str, float] = dict.fromkeys(requests, float("-inf"))  # silo → earliest time of its request
        while waiting and self.clock() < until:
            self._update_nodes()
            for name in list(waiting):
                self._send(name, requests[name], waiting)
                if self._node_of(name) is not None:
                    times[name] = self.clock()
                elif self.clock() - times[name] > away:
                    self.status.given_up(name)
                    self.report(name, f"not connected for {away:g} s")
                    del waiting[name]
            for answered in self._pull():
                reply = self._handle(*answered, waiting)
                if reply is not None:
                    del waiting[str(reply.fields["silo"])]
                    yield reply
            if waiting:
                self.sleep(POLL_INTERVAL)
        for message in [message for message, request in self._pending.items() if not request.greeting]:
            del self._pending[message]
        for name in waiting:
            self.status.given_up(name)
            self.report(name, f"no answer within {deadline:g} s")
        self.status.write()

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _update_nodes(self) -> None:
        """Update the connected nodes: greet new ones, and drop requests to nodes that have left."""
        now = self.clock()
        if now - self._nodes_updated < NODES_INTERVAL:
            return
        self.status.write()
        self._nodes_updated, self._online = now, self.link.nodes()
        for message, request in list(self._pending.items()):
            if request.node not in self._online:
                del self._pending[message]
        self._greet_at = {node: due for node, due in self._greet_at.items() if node in self._online}
        self._refused = {(node, reason) for node, reason in self._refused if node in self._online}
        for node in self._online:
            if self._greet_at.get(node, now) <= now and self._push("", node, self.greeting):
                self._greet_at[node] = now + self.patience

    def _node_of(self, name: str) -> int | None:
        """Return a silo's node if it is connected."""
        node = self._nodes.get(name)
        return node if node is not None and node in self._online else None

    def _send(self, name: str, request: Frame, waiting: dict[str, float]) -> None:
        """Send a silo's request if its node is connected and the request is due."""
        now, node = self.clock(), self._node_of(name)
        if node is None or now < waiting[name]:
            return
        times = [pending.since for pending in self._pending.values() if pending.silo == name and pending.node == node]
        pause = self.patience * 2 ** max(0, len(times) - 1)
        if times and now - max(times) < pause:
            return
        if times:
            self.report(name, f"no answer for {pause:g} s; asked again")
        if not self._push(name, node, request):
            waiting[name] = now + RETRY_DELAY

    def _push(self, silo: str, node: int, frame: Frame) -> bool:
        """Record and send a request (an empty name: a greeting), and return whether it could be sent."""
        data, request = frame.encode(), request_of(frame)
        self.record({"direction": "sent", "node": str(node), **request, **describe_frame(data, frame)})
        message = self.link.push(node, data)
        if message:
            self.status.sent(silo, frame.kind, len(data))
            self._pending[message] = _PendingRequest(silo, node, self.clock(), request["round"])
        return bool(message)

    # -- replies -------------------------------------------------------------------------------------------------------

    def _pull(self) -> Iterator[tuple[_PendingRequest, Frame | str]]:
        """Yield the requests that were answered since the last call, with the reply or an error; each is recorded."""
        for arrival in self.link.pull(list(self._pending)):
            request = self._pending.pop(arrival.message_id, None)
            if request is None:  # it came twice
                continue
            reply = _read(arrival)
            if arrival.error:
                came = {"kind": "error", "reason": arrival.error[:500]}
            else:
                came = describe_frame(arrival.data, None if isinstance(reply, str) else reply)
            run = request_of(self.greeting)["run"]
            self.record({"direction": "came", "node": str(request.node), "run": run, "round": request.round, **came})
            if isinstance(reply, Frame):
                reply = _plain(reply)
                self._note(request, reply, len(arrival.data))
            yield request, reply

    def _handle(self, request: _PendingRequest, frame: Frame | str, waiting: dict[str, float]) -> Frame | None:
        """Return the reply to a silo's request; greetings, errors and late replies are handled here."""
        sender = request.silo or f"node {request.node}"
        if isinstance(frame, str) or frame.kind == "unavailable":
            self.report(sender, frame if isinstance(frame, str) else str(frame.fields.get("reason")))
            if request.greeting:
                self._greet_at[request.node] = self.clock()
            elif request.silo in waiting:
                waiting[request.silo] = self.clock() + RETRY_DELAY
            return None
        if frame.kind == "waiting":
            self._await_approval(request, frame, waiting)
            return None
        if request.greeting:
            self._register(request.node, frame)
            return None
        if frame.fields.get("silo") != request.silo:
            self.report(sender, f"answered in the name of {frame.fields.get('silo')!r}")
            frame = Frame("failed", {"silo": request.silo, "reason": "answered in another name"})
        return frame if request.silo in waiting else None

    def _note(self, request: _PendingRequest, frame: Frame, size: int) -> None:
        """Note a message in the status; a greeted node speaks for a silo only if no other key is registered for it."""
        name, registered = str(frame.fields.get("silo", "")), self._online.get(request.node, "")
        own = name in self.silos and (not registered or registered in (name, f"silo-{name}"))
        sender = request.silo or (name if own else "")
        self.status.received("" if frame.kind == "unavailable" else sender, frame, size)

    def _await_approval(self, request: _PendingRequest, frame: Frame, waiting: dict[str, float]) -> None:
        """Ask again later; report once that a silo's operator has to approve the run."""
        name, reason = str(frame.fields.get("silo", "")), str(frame.fields.get("reason", ""))
        sender = request.silo or (name if name in self.silos else "")
        if (request.node, reason) not in self._refused:
            self._refused.add((request.node, reason))
            self.report(sender or f"node {request.node}", reason)
        now = self.clock()
        waited = now - self._approval_since.setdefault(request.node, now)
        due = now + min(max(APPROVAL_INTERVAL, waited / 10), LONGEST_APPROVAL_INTERVAL)
        if request.greeting:
            self._greet_at[request.node] = due
        elif request.silo in waiting:
            waiting[request.silo] = due

    def _register(self, node: int, frame: Frame) -> None:
        """Register the silo of a node that answered the greeting; a silo's newest node counts."""
        if self._greet_at.get(node) == _NEVER:  # greeted twice
            return
        name, registered = str(frame.fields.get("silo", "")), self._online.get(node, "")
        reason = ""
        if name not in self.silos:
            reason = f"not one of the federation's silos ({', '.join(self.silos)})"
        elif registered and registered not in (name, f"silo-{name}"):
            reason = f"its key is registered as {registered!r}; it is not let in"
        else:
            try:
                self.admit(frame)
            except HandshakeRefused as refusal:
                if self._strict:
                    raise
                reason = str(refusal)
        if not reason:
            self._nodes[name], self._greet_at[node] = node, _NEVER
        elif (node, reason) not in self._refused:
            self._refused.add((node, reason))
            self.report(name or f"node {node}", reason)


def _read(arrival: Arrival) -> Frame | str:
    """Return the frame that came, or what is wrong with it."""
    try:
        return arrival.error or decode(arrival.data)
    except ProtocolError as problem:
        return str(problem)


def _plain(frame: Frame) -> Frame:
    """Return a reply whose texts are safe to print, and short."""
    fields = dict(frame.fields)
    for name in ("silo", "reason"):
        if name in fields:
            fields[name] = printable(str(fields[name]), LONGEST_REASON)
    return replace(frame, fields=fields)
