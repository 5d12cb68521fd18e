"""Asking silos and waiting for them: who is there, what is under way, what is asked again, when waiting ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from silotune.distributed.flower.link import Arrival, Link
from silotune.distributed.protocol.frames import Frame, ProtocolError, decode
from silotune.distributed.protocol.handshake import HandshakeRefused

POLL_INTERVAL = 0.1
"""Seconds between looks at what has come."""

NODES_INTERVAL = 1.0
"""Seconds between looks at who is connected."""

RETRY_DELAY = 2.0
"""Seconds before a silo that could not answer is asked again."""

_NEVER = float("inf")


Report = Callable[[str, str], None]
"""(silo or node, what happened)."""


@dataclass
class _PendingRequest:
    """A request that is under way: to which node, since when, and whether it is only to learn a name."""

    silo: str
    node: int
    since: float
    greeting: bool = False


@dataclass
class SiloDispatcher:
    """Knows silos by name and reaches them at whatever node they have now.

    Args:
        link: what carries frames.
        silos: the names of all silos; others are not let in.
        greeting: the frame that asks a node who it is.
        admit: checks a hello (or what came in its place); raises HandshakeRefused to keep the node out. Before round 1
            that ends the run, later only the node is left out.
        report: told what went wrong.
        patience: seconds after which an unanswered request is sent again to the silo that owes the answer; each further
            time twice as many, because a silo that was only busy answers all of them. After so many seconds a node
            that has not been let in is asked again, too, who it is.
    """

    link: Link
    silos: Sequence[str]
    greeting: bytes
    admit: Callable[[Frame], None]
    report: Report = lambda *_: None
    patience: float = 120.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    hellos: dict[str, Frame] = field(default_factory=dict)
    """What silos said of themselves."""
    _nodes: dict[str, int] = field(default_factory=dict)
    _greet_at: dict[int, float] = field(default_factory=dict)
    """When a node that is there is to be asked (again) who it is; never, once it is let in."""
    _refused: set[tuple[int, str]] = field(default_factory=set)
    """Nodes that were not let in, and why: said once."""
    _pending: dict[str, _PendingRequest] = field(default_factory=dict)
    _online: Mapping[int, str] = field(default_factory=dict)
    _looked: float = float("-inf")
    _strict: bool = True

    def wait_for_all(self, deadline: float) -> list[str]:
        """Wait until all silos have said hello; the names of those that have not when time is up.

        Raises:
            HandshakeRefused: what `admit` raised.
        """
        until = self.clock() + deadline
        self._strict = True
        while missing := [name for name in self.silos if name not in self.hellos]:
            if self.clock() >= until:
                return missing
            self._update_nodes()
            for arrival in self.link.pull(list(self._pending)):
                self._handle(arrival, {})
            self.sleep(POLL_INTERVAL)
        return []

    def request(self, requests: Mapping[str, bytes], deadline: float, away: float = float("inf")) -> Iterator[Frame]:
        """Ask silos at once; their answers as they come, until all have answered or time is up.

        A silo that is away, or whose worker is, is asked when it is back. What comes too late is let go.

        Args:
            requests: silo → frame.
            deadline: seconds that any silo has.
            away: seconds after which one that is not connected is given up.
        """
        began = self.clock()
        until = began + deadline
        seen = dict.fromkeys(requests, began)
        self._strict = False
        waiting: dict[str, float] = dict.fromkeys(requests, float("-inf"))  # silo → not to be asked before
        while waiting and self.clock() < until:
            self._update_nodes()
            for name in list(waiting):
                self._send(name, requests[name], waiting)
                if self._node_of(name) is not None:
                    seen[name] = self.clock()
                elif self.clock() - seen[name] > away:
                    self.report(name, f"not connected for {away:g} s")
                    del waiting[name]
            for arrival in self.link.pull(list(self._pending)):
                answer = self._handle(arrival, waiting)
                if answer is not None:
                    del waiting[str(answer.fields["silo"])]
                    yield answer
            if waiting:
                self.sleep(POLL_INTERVAL)
        for message in [message for message, asked in self._pending.items() if not asked.greeting]:
            del self._pending[message]
        for name in waiting:
            self.report(name, f"no answer within {deadline:g} s")

    # -- who is there --------------------------------------------------------------------------------------------------

    def _update_nodes(self) -> None:
        """Greet nodes that have not been let in; forget what was under way to nodes that are gone."""
        now = self.clock()
        if now - self._looked < NODES_INTERVAL:
            return
        self._looked, self._online = now, self.link.nodes()
        for message, asked in list(self._pending.items()):
            if asked.node not in self._online:
                del self._pending[message]
        self._greet_at = {node: due for node, due in self._greet_at.items() if node in self._online}
        self._refused = {(node, why) for node, why in self._refused if node in self._online}
        for node in self._online:
            if self._greet_at.get(node, now) <= now and (sent := self.link.push(node, self.greeting)):
                self._pending[sent] = _PendingRequest("", node, now, greeting=True)
                self._greet_at[node] = now + self.patience

    def _node_of(self, name: str) -> int | None:
        node = self._nodes.get(name)
        return node if node is not None and node in self._online else None

    def _send(self, name: str, request: bytes, waiting: dict[str, float]) -> None:
        now, node = self.clock(), self._node_of(name)
        if node is None or now < waiting[name]:
            return
        sent = [asked.since for asked in self._pending.values() if asked.silo == name and asked.node == node]
        pause = self.patience * 2 ** max(0, len(sent) - 1)
        if sent and now - max(sent) < pause:
            return
        if sent:
            self.report(name, f"no answer for {pause:g} s; asked again")
        message = self.link.push(node, request)
        if message:
            self._pending[message] = _PendingRequest(name, node, now)
        else:
            waiting[name] = now + RETRY_DELAY

    # -- what comes ----------------------------------------------------------------------------------------------------

    def _handle(self, arrival: Arrival, waiting: dict[str, float]) -> Frame | None:
        """An answer to a silo's request; everything else is dealt with here."""
        asked = self._pending.pop(arrival.message, None)
        if asked is None:
            return None
        who = asked.silo or f"node {asked.node}"
        frame, error = None, arrival.error
        if not error:
            try:
                frame = decode(arrival.data)
            except ProtocolError as problem:
                error = str(problem)
        if frame is None or frame.kind == "unavailable":
            self.report(who, error or str(frame and frame.fields.get("reason")))
            self._retry_later(asked, waiting)
            return None
        if asked.greeting:
            self._register(asked.node, frame)
            return None
        if frame.fields.get("silo") != asked.silo:
            self.report(who, f"answered in the name of {frame.fields.get('silo')!r}")
            frame = Frame("failed", {"silo": asked.silo, "reason": "answered in another name"})
        return frame if asked.silo in waiting else None

    def _retry_later(self, asked: _PendingRequest, waiting: dict[str, float]) -> None:
        if asked.greeting:
            self._greet_at[asked.node] = self.clock()
        elif asked.silo in waiting:
            waiting[asked.silo] = self.clock() + RETRY_DELAY

    def _register(self, node: int, frame: Frame) -> None:
        """A node has said who it is. The newest node of a name is the silo's."""
        if self._greet_at.get(node) == _NEVER:  # asked twice, answered twice
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
            self.hellos[name], self._nodes[name], self._greet_at[node] = frame, node, _NEVER
        elif (node, reason) not in self._refused:
            self._refused.add((node, reason))
            self.report(name or f"node {node}", reason)
