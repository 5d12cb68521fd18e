"""A run's `federation/status.json`: its coordinator writes how far it is, and other processes read it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from silotune.core.clock import utc_now
from silotune.core.files import is_locked, read_json, write_text
from silotune.core.records import FILE
from silotune.distributed.protocol.frames import Frame
from silotune.errors import InputError, SilotuneError

if TYPE_CHECKING:
    from silotune.runs.engines.base import Progress

FEDERATION_FOLDER = "federation"
"""Subfolder of the run folder with the status, the registry, logs and the job."""

STARTUP_TIMEOUT = 600.0
"""Seconds for Flower, and then the coordinator, to start."""

INTERVAL = 1.0
"""Least seconds between two writings that only count messages."""

_FILE = "status.json"

_LONGEST = 40
"""Characters of a silo's version that are kept."""


@dataclass
class SiloEntry:
    """The state of one silo in this run; None stands for unknown.

    Args:
        asked: the request that it works on: `kind`, `round` and `since`.
        waits_since: time of its first answer that said so, until it answers otherwise.
        failure: its last answer's reason, if that was a refusal or a failure.
    """

    seen: str | None = None
    version: str | None = None
    protocol: int | None = None
    asked: dict[str, Any] | None = None
    waits: bool = False
    waits_since: str | None = None
    failure: str | None = None
    status: dict[str, Any] | None = None


@dataclass
class RunStatus:
    """A run's state, progress and silos, as the coordinator knows them.

    Args:
        path: the file; None keeps nothing.
        state: `submitted` until a coordinator works on the run. `lost` means that Flower failed, so that another
            coordinator may resume the run.
        guarantee: lines about the privacy guarantee, known before the first round.
        progress: round, activity, how many silos are done, and of how many, as `engines.base.Progress` gets them.
    """

    path: Path | None = None
    state: Literal["submitted", "working", "finished", "failed", "lost"] = "working"
    error: str = ""
    exit_code: int = 0
    guarantee: list[str] = field(default_factory=list)
    progress: list[Any] | None = None
    round: int = 0
    since: str = ""
    messages_down: int = 0
    messages_up: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    silos: dict[str, SiloEntry] = field(default_factory=dict)
    _written: float = float("-inf")

    @classmethod
    def begin(cls, folder: Path, state: Literal["submitted", "working"] = "working") -> RunStatus:
        """Write the status of a coordinator that starts or will start; counts of an interrupted run continue."""
        before = read_status(folder) or cls()
        counts = {name: getattr(before, name) for name in _COUNTS}
        silos = {name: replace(old, asked=None, waits=False, failure=None) for name, old in before.silos.items()}
        status = cls(folder / _FILE, state, silos=silos, **counts)
        status.write(at_once=True)
        return status

    def report(self, number: int, activity: str, done: int, total: int) -> None:
        """Note progress; arguments as `engines.base.Progress`."""
        if number != self.round or not self.since:
            self.round, self.since = number, utc_now()
        self.progress = [number, activity, done, total]
        self.write(at_once=True)

    def promise(self, lines: list[str]) -> None:
        """Note the privacy guarantee."""
        self.guarantee = lines
        self.write(at_once=True)

    def end(self, error: Exception | None = None, resumable: bool = False) -> None:
        """Note how the coordinator ended."""
        self.state = "finished"
        if error is not None:
            own = isinstance(error, SilotuneError)
            self.state = "lost" if resumable else "failed"
            self.error = str(error) if own else f"{type(error).__name__}: {error}"
            self.exit_code = error.exit_code if isinstance(error, SilotuneError) else 1
        self.write(at_once=True)

    def sent(self, silo: str, kind: str, size: int) -> None:
        """Note a message to a silo; the empty name is a node that was only greeted."""
        self.messages_down += 1
        self.bytes_down += size
        if silo:
            self._of(silo).asked = {"kind": kind, "round": self.round, "since": utc_now()}

    def received(self, silo: str, frame: Frame, size: int) -> None:
        """Note a message from a silo, whose node was asked in its name or is registered under it."""
        self.messages_up += 1
        self.bytes_up += size
        if not silo:
            return
        entry = self._of(silo)
        entry.seen, entry.asked, entry.waits = utc_now(), None, frame.kind == "waiting"
        entry.waits_since = (entry.waits_since or entry.seen) if entry.waits else None
        refused = frame.kind in ("refused", "failed")
        entry.failure = str(frame.fields.get("reason")) if refused else None
        from silotune.distributed.protocol.disclosure import SiloStatus  # these import torch, which readers do without
        from silotune.distributed.protocol.handshake import protocol_of

        status = SiloStatus.read(frame.fields.get("status"))
        if status is not None:
            entry.status = status.fields()
        identity = frame.fields.get("identity")
        if frame.kind == "hello" and isinstance(identity, dict):
            entry.version, entry.protocol = str(identity.get("version"))[:_LONGEST], protocol_of(identity)

    def waits(self, silo: str) -> bool:
        """Return whether a silo said in this session that its operator has not approved the run yet."""
        return silo in self.silos and self.silos[silo].waits

    def given_up(self, silo: str) -> None:
        """Note that a silo is not waited for any more."""
        self._of(silo).asked = None

    def write(self, at_once: bool = False) -> None:
        """Write the file, at most once in `INTERVAL` seconds unless `at_once`."""
        now = time.monotonic()
        if self.path is None or (now - self._written < INTERVAL and not at_once):
            return
        fields = {name: value for name, value in asdict(self).items() if name not in ("path", "_written")}
        write_text(self.path, json.dumps(fields, indent=1) + "\n")
        self._written = now

    def require_finished(self) -> None:
        """Raise the error that ended the coordinator, if any."""
        if self.state != "finished":
            raise (InputError if self.exit_code == 2 else SilotuneError)(self.error)

    def _of(self, silo: str) -> SiloEntry:
        return self.silos.setdefault(silo, SiloEntry())


_COUNTS = ("messages_down", "messages_up", "bytes_down", "bytes_up")


def log_folder(run: Path) -> Path:
    """Return the folder with the audit log of a run folder: of a run of a plan, the plan's."""
    own, plan = run / FEDERATION_FOLDER, run.parent / FEDERATION_FOLDER
    return plan if (plan / FILE).exists() and not (own / FILE).exists() else own


def read_status(folder: Path) -> RunStatus | None:
    """Read the status in a run's `federation` folder; None if there is none, or it cannot be read."""
    try:
        fields = read_json(folder / _FILE)
        silos = {name: SiloEntry(**entry) for name, entry in fields["silos"].items()}
        return RunStatus(**(fields | {"silos": silos}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class RunFollower:
    """Follows a coordinator on this machine, from its submission to its end."""

    def __init__(
        self, folder: Path, progress: Progress | None = None, announce: Callable[[str], None] | None = None
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._announce = announce
        self._last: list[Any] | None = None
        self._since = time.monotonic()

    def poll(self) -> RunStatus:
        """Pass on progress and privacy guarantee; return the present status.

        A coordinator that has not begun in time, or whose process is gone, is returned as `lost`.
        """
        status = read_status(self._folder) or RunStatus(state="submitted")
        if self._announce is not None and status.guarantee:
            for line in status.guarantee:
                self._announce(line)
            self._announce = None
        if self._progress is not None and status.progress is not None and status.progress != self._last:
            self._last = status.progress
            self._progress(*status.progress)
        if status.state == "submitted" and time.monotonic() - self._since > STARTUP_TIMEOUT:
            status.state = "lost"
            status.error = f"the coordinator has not begun within {STARTUP_TIMEOUT:g} s (see the SuperLink's log)"
        if status.state == "working" and not is_locked(self._folder):
            status = read_status(self._folder) or status  # it may have ended between reading and asking
            if status.state == "working":
                status.state, status.error = "lost", "the coordinator's process is gone (run again with --resume)"
        return status
