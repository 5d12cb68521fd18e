"""The time and the user, for records; results never depend on them."""

from __future__ import annotations

import getpass
import json
import os
import sys
from datetime import UTC, datetime
from typing import TextIO


def utc_now(timespec: str = "seconds") -> str:
    """Return the time in UTC (ISO 8601), to the second or as `datetime.isoformat` cuts it."""
    return datetime.now(UTC).isoformat(timespec=timespec)


def logs_json() -> bool:
    """Return whether long-running processes write JSON objects instead of lines (`SILOTUNE_LOG=json`)."""
    return os.environ.get("SILOTUNE_LOG") == "json"


def log_line(text: str, file: TextIO | None = None) -> None:
    """Write a line of a long-running process, with the time before it; with `SILOTUNE_LOG=json` as a JSON object.

    It goes to standard error, unless another file is given.
    """
    line = json.dumps({"time": utc_now(), "text": text}) if logs_json() else f"{utc_now()} {text}"
    print(line, file=sys.stderr if file is None else file, flush=True)


def current_user() -> str:
    """Return the user who runs this process; under `sudo`, as `CALLER as USER`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # no entry for the number, or no such entries
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    caller = os.environ.get("SUDO_USER")
    return f"{caller} as {user}" if caller and caller != user else user
