"""The nursery (`nursery.py`) as whoever orders processes from it sees it."""

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
    """A process that the nursery forked: as much of `subprocess.Popen` as is needed here."""

    def __init__(self, pid: int, fork_server: ForkServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._fork_server = fork_server

    def poll(self) -> int | None:
        """How it ended, -1 where nobody knows; None while it runs."""
        if self.returncode is None and not is_alive(self.pid):
            self.returncode = self._fork_server.code(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for its end."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.02)
        return code


class ForkServer:
    """The process that forks others (see `nursery.py`)."""

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
        """Fork a process; None if the nursery is gone."""
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(f"{json.dumps(order)}\n".encode())
            self._process.stdin.flush()
        except OSError:
            return None
        process = self._started.get()
        return ForkedProcess(process, self) if process else None

    def code(self, process: int, patience: float = 1.0) -> int:
        """How a process that is gone ended, as soon as the nursery says so; -1 if it does not."""
        until = time.monotonic() + patience
        while process not in self._codes and self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        return self._codes.get(process, -1)

    def _listen(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            said = json.loads(line)
            if "started" in said:
                self._started.put(int(said["started"]))
            else:
                self._codes[int(said["ended"])] = int(said["code"])
        self._process.wait()
        self._started.put(0)  # it is gone

    def end(self) -> None:
        """Let it go; what it forked stays."""
        self._process.kill()


def is_alive(process: int) -> bool:
    """Whether a process of this id runs; one that ended and that nobody has asked for since does not."""
    try:
        os.kill(process, 0)
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # another user's, or a system without /proc
        return True
