"""`Supervisor`: a context of processes (`ManagedProcess`) with a log each: starts, restarts, ends them together.

`silotune federation` and `--engine flower-local` run Flower's processes and the workers under it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from silotune.distributed.processes.fork_client import ForkedProcess, ForkServerHandle
from silotune.distributed.processes.rotating_log import RotatingLog
from silotune.distributed.processes.watchdog import TOKEN, end_process_group
from silotune.errors import SilotuneError

LAST_OUTPUT = 1.0
"""Seconds for the last output of a process that has ended to reach its log."""


@dataclass
class ManagedProcess:
    """A supervised process and how it was started.

    Args:
        name: the name of the process and of its log.
        command: the command line.
        log: the file for its output.
        process: the running process.
        starts: how often it was started.
        environment: variables besides the supervisor's.
        imports: modules that the fork server imports for it.
        output: moves its output to the log; None if the fork server started it, which writes to the log itself.
    """

    name: str
    command: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes] | ForkedProcess
    starts: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    imports: Sequence[str] = ()
    output: RotatingLog | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def tail(self, lines: int = 3) -> str:
        """Return the last lines of its log, joined to one."""
        if self.output is not None and not self.alive:
            self.output.wait(LAST_OUTPUT)
        with contextlib.suppress(OSError):
            text = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return " | ".join(line.strip() for line in text[-lines:])
        return ""


class Supervisor:
    """A context in which processes run; they end with it: on success, on failure, on Ctrl-C, and on `kill -9`.

    Args:
        logs: the folder of their logs.
        environment: variables besides this process's own environment.
        fork_server: fork them from a process that has imported their libraries (Linux only). Their commands must then
            be keys of `fork_server.COMMANDS`.
        timed_logs: whether lines of the logs that begin with no time get one; the fork server's processes write theirs.
    """

    def __init__(
        self, logs: Path, environment: Mapping[str, str], fork_server: bool = False, timed_logs: bool = False
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._timed_logs = timed_logs
        self.token = secrets.token_hex(16)  # marks the environment of all processes, for the watchdog
        interpreter_folder = str(Path(sys.executable).parent)  # Flower finds its own commands through PATH
        path = os.pathsep.join([interpreter_folder, os.environ.get("PATH", "")])
        self.environment = {**os.environ, "PATH": path, **environment, TOKEN: self.token}
        self.children: dict[str, ManagedProcess] = {}
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._use_fork_server = fork_server and sys.platform == "linux"
        self._fork_server: ForkServerHandle | None = None
        self._previous_sigterm_handler: Any = None

    def __enter__(self) -> Supervisor:
        command = [sys.executable, "-m", "silotune.distributed.processes.watchdog"]
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._watchdog.stdin is not None, "it is a pipe"
        self._watchdog.stdin.write(f"{self.token}\n".encode())
        self._watchdog.stdin.flush()
        self._previous_sigterm_handler = _set_signal_handler(signal.SIGTERM, _interrupt)
        if self._use_fork_server:  # it imports libraries while the caller prepares the run
            self._fork_server = self._start_fork_server()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _set_signal_handler(signal.SIGTERM, signal.SIG_IGN)
        previous = _set_signal_handler(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the shutdown
        try:
            self.end()
        finally:
            _set_signal_handler(signal.SIGINT, previous)
            _set_signal_handler(signal.SIGTERM, self._previous_sigterm_handler)
            if self._watchdog is not None and self._watchdog.stdin is not None:
                self._watchdog.stdin.close()
                self._watchdog.wait(timeout=60)

    def end(self, *names: str, grace: float = 5.0) -> None:
        """End these processes, or all of them, with their descendants: SIGTERM, and SIGKILL after `grace` seconds."""
        chosen = [self.children.pop(name) for name in names or list(self.children) if name in self.children]
        if not names:
            if sys.platform == "linux":
                end_process_group(self.token)
            if self._fork_server is not None:
                self._fork_server.end()
        _end_process_groups([child.process for child in chosen], grace)
        for child in chosen:
            if child.output is not None:
                child.output.wait(LAST_OUTPUT)

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
    ) -> ManagedProcess:
        """Start a process in a session of its own.

        Args:
            name: the name of the process and of its log.
            command: the command line.
            environment: variables besides the supervisor's.
            imports: modules that the fork server imports once for all its processes.
        """
        log = self._logs / f"{name}.log"
        starts = self.children[name].starts + 1 if name in self.children else 1
        process: subprocess.Popen[bytes] | ForkedProcess
        output = None
        if self._use_fork_server:
            process = self._fork(name, list(command), log, dict(environment or {}), list(imports))
        else:
            output = RotatingLog(log, timed=self._timed_logs)
            process = self._spawn(list(command), output, dict(environment or {}))
        self.children[name] = ManagedProcess(name, command, log, process, starts, environment or {}, imports, output)
        return self.children[name]

    def restart(self, name: str) -> ManagedProcess:
        """Start a process that has ended once more, with the same command."""
        child = self.children[name]
        _end_process_groups([child.process])
        if child.output is not None:  # the next process writes to the same file
            child.output.wait(LAST_OUTPUT)
        return self.start(name, child.command, child.environment, child.imports)

    def _spawn(self, command: list[str], output: RotatingLog, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a new process."""
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output.sink,
                stderr=output.sink,
                env={**self.environment, **environment},
                start_new_session=True,
            )
        finally:
            output.close_sink()

    def _fork(
        self, name: str, command: list[str], log: Path, environment: dict[str, str], imports: list[str]
    ) -> ForkedProcess:
        """Fork a process from the fork server."""
        for _ in range(2):  # a fork server that was killed is replaced
            if self._fork_server is None:
                self._fork_server = self._start_fork_server()
            forked = self._fork_server.start(name, command, log, environment, imports)
            if forked is not None:
                return forked
            self._fork_server = None
        raise SilotuneError(f"{name}: cannot be started (see {self._logs / 'fork-server.log'})")

    def _start_fork_server(self) -> ForkServerHandle:
        return ForkServerHandle(self._logs / "fork-server.log", self.environment)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM as Ctrl-C."""
    raise KeyboardInterrupt


def _set_signal_handler(number: signal.Signals, handler: Any) -> Any:
    """Set a signal's handler and return the previous one; does nothing outside the main thread."""
    if handler is None or threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(number, handler)


def _end_process_groups(processes: Sequence[subprocess.Popen[bytes] | ForkedProcess], grace: float = 5.0) -> None:
    """End processes and their groups: SIGTERM, and SIGKILL after `grace` seconds.

    A process that was just forked has no group of its own yet, so the process itself is signalled, too.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process.poll() is None:
                    os.kill(process.pid, number)
        until = time.monotonic() + grace
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, until - time.monotonic()))
        while any(map(_group_alive, processes)) and time.monotonic() < until:
            time.sleep(0.02)
        if not any(map(_group_alive, processes)):
            return


def _group_alive(process: subprocess.Popen[bytes] | ForkedProcess) -> bool:
    """Return whether a process or any process of its group runs."""
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return process.poll() is None
    return True
