"""Client of the fork server."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ForkedProcess:
    """A process forked by the fork server, with the part of `subprocess.Popen`'s interface that the supervisor uses."""

    def __init__(self, pid: int, fork_server: ForkServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._fork_server = fork_server

    def poll(self) -> int | None:
        """Exit code, -1 if unknown, None while running."""
        if self.returncode is None and not is_alive(self.pid):
            self.returncode = self._fork_server.code(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the process to end.

        Returns:
            The exit code, -1 if unknown.

        Raises:
            TimeoutExpired: it still runs after `timeout` seconds.
        """
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.02)
        return code


class ForkServer:
    """A running fork server.

    Args:
        log: file for its errors.
        environment: its whole environment, inherited by forked processes.
    """

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "silotune.distributed.processes.fork_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self._started: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._codes: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, **order: Any) -> ForkedProcess | None:
        """Fork a process; returns None if the fork server is gone."""
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(f"{json.dumps(order)}\n".encode())
            self._process.stdin.flush()
        except OSError:
            return None
        process = self._started.get()
        return ForkedProcess(process, self) if process else None

    def code(self, process: int, patience: float = 1.0) -> int:
        """Return the exit code of a process that ended; -1 if the server does not report it within `patience` s."""
        until = time.monotonic() + patience
        while process not in self._codes and self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        return self._codes.get(process, -1)

    def _listen(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            report = json.loads(line)
            if "started" in report:
                self._started.put(int(report["started"]))
            else:
                self._codes[int(report["ended"])] = int(report["code"])
        self._process.wait()
        self._started.put(0)  # unblocks `start`

    def end(self) -> None:
        """End the fork server; forked processes go on."""
        self._process.kill()


def is_alive(process: int) -> bool:
    """Return whether a process of this id runs; zombies do not count."""
    try:
        os.kill(process, 0)
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # another user's, or a system without /proc
        return True
