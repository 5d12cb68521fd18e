"""What a coordinator says of itself in files: that it began, what it does, how it ended; and how others read that."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from silotune.core.files import write_text
from silotune.distributed.processes.fork_client import is_alive
from silotune.errors import InputError, SilotuneError

STARTUP_TIMEOUT = 600.0
"""Seconds that Flower, and then the coordinator, has to come up."""

_STARTED, _GUARANTEE, _PROGRESS, _OUTCOME = "coordinator.json", "promise.json", "progress.json", "outcome.json"


def clear(place: Path) -> None:
    """Drop what the coordinator before said.

    Args:
        place: the run folder's part that is about the machines.
    """
    for name in (_STARTED, _GUARANTEE, _PROGRESS, _OUTCOME):
        (place / name).unlink(missing_ok=True)


def write_started(place: Path) -> None:
    """Say that the coordinator is this process."""
    write_text(place / _STARTED, json.dumps({"pid": os.getpid()}))


def write_privacy_guarantee(place: Path, lines: Sequence[str]) -> None:
    """What its noise promises, before the first round."""
    write_text(place / _GUARANTEE, json.dumps(list(lines)))


def write_progress(place: Path, number: int, what: str, done: int, total: int) -> None:
    """As `engines.base.Progress`."""
    write_text(place / _PROGRESS, json.dumps([number, what, done, total]))


def write_outcome(place: Path, error: Exception | None = None, lost: bool = False) -> None:
    """How it ended; `lost`: for want of Flower, so that another coordinator may go on."""
    said: dict[str, Any] = {"state": "finished"}
    if error is not None:
        text, code = f"{type(error).__name__}: {error}", 1
        if isinstance(error, SilotuneError):
            text, code = str(error), error.exit_code
        said = {"state": "lost" if lost else "failed", "error": text, "exit_code": code}
    write_text(place / _OUTCOME, json.dumps(said))


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is none, or none yet."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return None


class CoordinatorMonitor:
    """A coordinator on this machine, seen through what it says. It was started just now.

    Args:
        place: the run folder's part that is about the machines.
        progress: told what the coordinator does, when that changes.
        announce: told, line by line, what the run's noise promises.
    """

    def __init__(
        self,
        place: Path,
        progress: Callable[[int, str, int, int], None],
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self._place = place
        self._progress = progress
        self._announce = announce
        self._told = ""
        self._since = time.monotonic()

    def outcome(self) -> dict[str, Any] | None:
        """How it ended; None while it has not said so."""
        return read_json(self._place / _OUTCOME)

    def poll(self) -> None:
        """Pass what it says on."""
        if self._announce is not None and (self._place / _GUARANTEE).exists():
            for line in json.loads((self._place / _GUARANTEE).read_text(encoding="utf-8")):
                self._announce(line)
            self._announce = None
        with contextlib.suppress(OSError, ValueError):
            text = (self._place / _PROGRESS).read_text(encoding="utf-8")
            if text != self._told:
                self._told = text
                self._progress(*json.loads(text))

    def failure_reason(self) -> str:
        """Why no outcome is to be expected any more; empty where one is."""
        begun = read_json(self._place / _STARTED)
        if begun is None:
            late = time.monotonic() - self._since > STARTUP_TIMEOUT
            return (
                f"the coordinator has not begun within {STARTUP_TIMEOUT:g} s (see the SuperLink's log)" if late else ""
            )
        if is_alive(int(begun["pid"])) or self.outcome() is not None:
            return ""
        return "the coordinator's process is gone"


def require_finished(outcome: dict[str, Any]) -> None:
    """Raise what ended a coordinator.

    Raises:
        InputError: what it refused.
        SilotuneError: it failed.
    """
    if outcome["state"] != "finished":
        raise (InputError if outcome.get("exit_code") == 2 else SilotuneError)(str(outcome.get("error")))
