"""`ForkServerHandle` starts a fork server and has it fork processes (`ForkedProcess`): its exit codes."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_SERVER_GONE = 0
"""Stands for a process id in the queue of started processes once the server has ended."""


class ForkedProcess:
    """A process forked by the fork server, with the part of `subprocess.Popen`'s interface that the supervisor uses."""

    def __init__(self, pid: int, fork_server: ForkServerHandle) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._fork_server = fork_server

    def poll(self) -> int | None:
        """Exit code, -1 if unknown, None while running."""
        if self.returncode is None and not is_alive(self.pid):
            self.returncode = self._fork_server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the process to end.

        Returns:
            The exit code, -1 if unknown.

        Raises:
            TimeoutExpired: if it still runs after `timeout` seconds.
        """
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.02)
        return code


class ForkServerHandle:
    """Starts a fork server (`fork_server.py`) as a process and talks to it through pipes.

    Args:
        log: the file for its errors.
        environment: its whole environment, which forked processes inherit.
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

    def start(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str], imports: Sequence[str]
    ) -> ForkedProcess | None:
        """Have the server fork a process; returns None if the server is gone.

        Args:
            name: the name of the process.
            command: the command line; a key of `fork_server.COMMANDS` and its arguments.
            log: the file for its output.
            environment: variables besides the server's.
            imports: modules that the server imports before it forks.
        """
        order = {
            "name": name,
            "command": list(command),
            "log": str(log),
            "environment": dict(environment),
            "imports": list(imports),
        }
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(f"{json.dumps(order)}\n".encode())
            self._process.stdin.flush()
        except OSError:
            return None
        pid = self._started.get()
        return None if pid == _SERVER_GONE else ForkedProcess(pid, self)

    def exit_code(self, pid: int) -> int:
        """Return the exit code of a process that ended; -1 if the server does not report it within a second."""
        until = time.monotonic() + 1
        while pid not in self._codes and self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        return self._codes.get(pid, -1)

    def _listen(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            report = json.loads(line)
            if "started" in report:
                self._started.put(int(report["started"]))
            else:
                self._codes[int(report["ended"])] = int(report["code"])
        self._process.wait()
        self._started.put(_SERVER_GONE)  # `start` may be waiting

    def end(self) -> None:
        """End the fork server; the processes that it forked keep running."""
        self._process.kill()


def is_alive(pid: int) -> bool:
    """Return whether a process with this id runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # another user's process, or a system without /proc
        return True
