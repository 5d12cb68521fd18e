"""A coordinator's status as files (started, guarantee, progress, outcome); `CoordinatorMonitor` follows them.

The coordinator writes them. The monitor reads them in another process, and decides that a coordinator has died or never
started.
"""

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
"""Seconds for Flower, and then the coordinator, to start."""

_STARTED, _GUARANTEE, _PROGRESS, _OUTCOME = "coordinator.json", "promise.json", "progress.json", "outcome.json"


def clear(folder: Path) -> None:
    """Delete the status files of an earlier coordinator.

    Args:
        folder: `run_registry.FOLDER` in the run folder.
    """
    for name in (_STARTED, _GUARANTEE, _PROGRESS, _OUTCOME):
        (folder / name).unlink(missing_ok=True)


def write_started(folder: Path) -> None:
    """Record this process as the coordinator."""
    write_text(folder / _STARTED, json.dumps({"pid": os.getpid()}))


def write_privacy_guarantee(folder: Path, lines: Sequence[str]) -> None:
    """Record the privacy guarantee, before the first round."""
    write_text(folder / _GUARANTEE, json.dumps(list(lines)))


def write_progress(folder: Path, number: int, activity: str, done: int, total: int) -> None:
    """Record progress; arguments as `engines.base.Progress`."""
    write_text(folder / _PROGRESS, json.dumps([number, activity, done, total]))


def read_progress(folder: Path) -> tuple[int, str, int, int] | None:
    """Return the progress that a coordinator recorded last; None before its first."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        number, activity, done, total = json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))
        return number, activity, done, total
    return None


def write_outcome(folder: Path, error: Exception | None = None, resumable: bool = False) -> None:
    """Record how the coordinator ended.

    Args:
        folder: the folder of the status files.
        error: the exception that ended it; None if it finished.
        resumable: whether Flower failed, so that another coordinator may resume the run (the file's state `lost`).
    """
    fields: dict[str, Any] = {"state": "finished"}
    if error is not None:
        text, code = f"{type(error).__name__}: {error}", 1
        if isinstance(error, SilotuneError):
            text, code = str(error), error.exit_code
        fields = {"state": "lost" if resumable else "failed", "error": text, "exit_code": code}
    write_text(folder / _OUTCOME, json.dumps(fields))


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return None


class CoordinatorMonitor:
    """Follows a coordinator on this machine through its status files, from its start.

    Args:
        folder: the folder of the status files.
        progress: called with the coordinator's progress when it changes.
        announce: called with each line of the privacy guarantee.
    """

    def __init__(
        self,
        folder: Path,
        progress: Callable[[int, str, int, int], None],
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._announce = announce
        self._last_progress: tuple[int, str, int, int] | None = None
        self._since = time.monotonic()

    def outcome(self) -> dict[str, Any] | None:
        """Return how the coordinator ended; None while it runs."""
        return read_json(self._folder / _OUTCOME)

    def poll(self) -> None:
        """Pass on progress and privacy guarantee."""
        if self._announce is not None and (self._folder / _GUARANTEE).exists():
            for line in json.loads((self._folder / _GUARANTEE).read_text(encoding="utf-8")):
                self._announce(line)
            self._announce = None
        progress = read_progress(self._folder)
        if progress is not None and progress != self._last_progress:
            self._last_progress = progress
            self._progress(*progress)

    def failure_reason(self) -> str:
        """Return why the coordinator cannot finish any more (never started, process gone), or ''."""
        started = read_json(self._folder / _STARTED)
        if started is None:
            late = time.monotonic() - self._since > STARTUP_TIMEOUT
            return (
                f"the coordinator has not begun within {STARTUP_TIMEOUT:g} s (see the SuperLink's log)" if late else ""
            )
        if is_alive(int(started["pid"])) or self.outcome() is not None:
            return ""
        return "the coordinator's process is gone"


def require_finished(outcome: dict[str, Any]) -> None:
    """Raise the error that ended a coordinator, if any.

    Raises:
        SilotuneError: it failed.
    """
    if outcome["state"] != "finished":
        raise (InputError if outcome.get("exit_code") == 2 else SilotuneError)(str(outcome.get("error")))
