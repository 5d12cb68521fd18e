"""`SiloBoard`: what the coordinator knows of each silo, in `federation/silos.json` for status and metrics.

Other processes read the file (`silotune federation status`, the metrics and the status page). A run does not depend on
it.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from silotune.core.clock import utc_now
from silotune.core.files import write_text
from silotune.distributed.protocol.frames import Frame, peek_kind
from silotune.distributed.protocol.handshake import protocol_of
from silotune.distributed.protocol.silo_status import SiloStatus

FILE = "silos.json"

INTERVAL = 1.0
"""Least seconds between two writings."""

_LONGEST = 40
"""Characters of a silo's version that are kept."""


@dataclass
class SiloEntry:
    """What is known of one silo in this run; None where it is not.

    Args:
        seen: time of its last message, UTC in ISO format.
        version: of its silotune.
        protocol: number of its message format.
        asked: the request that it works on: `kind`, `round` and `since`.
        waits: whether its operator has not approved the run yet.
        status: what it shares of its operation, as `SiloStatus`.
    """

    seen: str | None = None
    version: str | None = None
    protocol: int | None = None
    asked: dict[str, Any] | None = None
    waits: bool = False
    status: dict[str, Any] | None = None


@dataclass
class SiloBoard:
    """A run's silos, round and messages.

    Args:
        path: the file; None keeps nothing.
    """

    path: Path | None = None
    round: int = 0
    since: str = ""
    messages_down: int = 0
    messages_up: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    silos: dict[str, SiloEntry] = field(default_factory=dict)
    _written: float = float("-inf")
    _changed: bool = False

    @classmethod
    def open(cls, folder: Path) -> SiloBoard:
        """Open the board in a run's `federation` folder; the counts of an interrupted run go on."""
        fields = read_board(folder) or {}
        counts = {name: fields[name] for name in _COUNTS if type(fields.get(name)) is int}
        board = cls(folder / FILE, **counts)
        for name, entry in fields.get("silos", {}).items():
            board.silos[name] = SiloEntry(**(entry | {"asked": None, "waits": False}))
        return board

    def at_round(self, number: int) -> None:
        """Note the round that is worked on."""
        if number != self.round or not self.since:
            self.round, self.since, self._changed = number, utc_now(), True

    def sent(self, silo: str, data: bytes) -> None:
        """Note a message to a silo; the empty name stands for a node that was only greeted."""
        self.messages_down += 1
        self.bytes_down += len(data)
        if silo:
            self._of(silo).asked = {"kind": peek_kind(data), "round": self.round, "since": utc_now()}
        self._changed = True

    def received(self, silo: str, frame: Frame, size: int) -> None:
        """Note a message from a silo, whose node was asked in its name or is registered under it."""
        self.messages_up += 1
        self.bytes_up += size
        self._changed = True
        if not silo:
            return
        entry = self._of(silo)
        entry.seen, entry.asked, entry.waits = utc_now(), None, frame.kind == "waiting"
        status = SiloStatus.read(frame.fields.get("status"))
        if status is not None:
            entry.status = status.fields()
        identity = frame.fields.get("identity")
        if frame.kind == "hello" and isinstance(identity, dict):
            entry.version, entry.protocol = str(identity.get("version"))[:_LONGEST], protocol_of(identity)

    def given_up(self, silo: str) -> None:
        """Note that a silo is not waited for any more."""
        self._of(silo).asked, self._changed = None, True

    def write(self, at_once: bool = False) -> None:
        """Write the file if something changed, at most once in `INTERVAL` seconds unless `at_once`."""
        now = time.monotonic()
        if self.path is None or not self._changed or (now - self._written < INTERVAL and not at_once):
            return
        fields = {name: getattr(self, name) for name in ("round", "since", *_COUNTS)}
        silos = {name: asdict(entry) for name, entry in sorted(self.silos.items())}
        write_text(self.path, json.dumps(fields | {"silos": silos}, indent=1) + "\n")
        self._written, self._changed = now, False

    def _of(self, silo: str) -> SiloEntry:
        return self.silos.setdefault(silo, SiloEntry())


_COUNTS = ("messages_down", "messages_up", "bytes_down", "bytes_up")


def read_board(folder: Path) -> dict[str, Any] | None:
    """Read the board in a run's `federation` folder; None if there is none, or it cannot be read."""
    try:
        fields = json.loads((folder / FILE).read_text(encoding="utf-8"))
        for entry in fields["silos"].values():
            SiloEntry(**entry)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(fields)
