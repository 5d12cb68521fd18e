"""Program that ends all processes with a token, on request or when their supervisor is gone (`kill -9`).

A random token in the environment identifies the group. Children inherit it, including those that Flower starts in
sessions of their own. `python -m silotune.distributed.processes.watchdog` reads the token from its standard input and
waits; when the other end closes, it ends every process with the token. Linux only; elsewhere the supervisor ends
operating-system process groups instead.
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
    """Return the ids of all running processes with a token, except this one."""
    wanted = f"{TOKEN}={token}".encode()
    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) != os.getpid() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                processes.append(int(entry.name))
    return processes


def end_process_group(token: str) -> list[int]:
    """End all processes with a token: SIGTERM, and SIGKILL after `_GRACE` seconds.

    Returns:
        The processes that still run after another 20 seconds.
    """
    _signal(process_group(token), signal.SIGTERM)
    forced = time.monotonic() + _GRACE
    until = forced + _LONGEST
    while (remaining := process_group(token)) and time.monotonic() < until:
        if time.monotonic() >= forced:
            _signal(remaining, signal.SIGKILL)
        time.sleep(0.05)
    return remaining


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def main() -> None:
    """Wait for the end of standard input, then end the group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    token = sys.stdin.readline().strip()
    if token:
        sys.stdin.read()
        end_process_group(token)


if __name__ == "__main__":
    main()
