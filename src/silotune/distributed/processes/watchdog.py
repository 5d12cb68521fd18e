"""Takes a family of processes down: on request, or when whoever started them is gone, even by `kill -9`.

Processes are told apart by a random token in their environment. Their children inherit it, also those that Flower
starts in sessions of their own. `python -m silotune.distributed.processes.watchdog` reads the token from its standard
input and waits there; when the other end closes, it ends every process with the token. Linux only; elsewhere process
groups are ended instead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

TOKEN = "SILOTUNE_FAMILY"

_GRACE = 5.0

_LONGEST = 20.0


def process_group(token: str) -> list[int]:
    """The ids of all living processes of a family, but this one."""
    wanted = f"{TOKEN}={token}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) != os.getpid() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end(token: str, grace: float = _GRACE) -> list[int]:
    """End a family: first asked, after `grace` seconds forced. What is still there after a while, if anything."""
    _signal(process_group(token), signal.SIGTERM)
    forced = time.monotonic() + grace
    until = forced + _LONGEST
    while (left := process_group(token)) and time.monotonic() < until:
        if time.monotonic() >= forced:
            _signal(left, signal.SIGKILL)
        time.sleep(0.05)
    return left


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def main() -> None:
    """Wait for the end of standard input, then end the family."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    token = sys.stdin.readline().strip()
    if token:
        sys.stdin.read()
        end(token)


if __name__ == "__main__":
    main()
