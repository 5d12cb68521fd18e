"""Processes that belong together: started with a log each, looked after, and always taken down."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from silotune.distributed.processes.fork_client import ForkedProcess, ForkServer
from silotune.distributed.processes.watchdog import TOKEN, end
from silotune.errors import SilotuneError


@dataclass
class ManagedProcess:
    """One process: how it is started, and how often it was."""

    name: str
    words: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes] | ForkedProcess
    starts: int = 1
    more: Mapping[str, str] = field(default_factory=dict)
    imports: Sequence[str] = ()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def tail(self, lines: int = 3) -> str:
        """The end of its log, as one line."""
        with contextlib.suppress(OSError):
            text = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return " | ".join(line.strip() for line in text[-lines:])
        return ""


class Supervisor:
    """A context in which processes run. They end with it: on success, on failure, on Ctrl-C, and on `kill -9`.

    Args:
        logs: the folder of their logs.
        environment: what they see besides this process's own environment.
        nursery: fork them from a process that has imported what they need, where that can be done. Their words must
            then be commands that `nursery.py` knows.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str], fork_server: bool = False) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self.token = secrets.token_hex(16)
        beside = str(Path(sys.executable).parent)  # Flower finds its own commands through PATH
        path = os.pathsep.join([beside, os.environ.get("PATH", "")])
        self.environment = {**os.environ, "PATH": path, **environment, TOKEN: self.token}
        self.children: dict[str, ManagedProcess] = {}
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._use_fork_server = fork_server and sys.platform == "linux"
        self._fork_server: ForkServer | None = None
        self._before: Any = None

    def __enter__(self) -> Supervisor:
        words = [sys.executable, "-m", "silotune.distributed.processes.watchdog"]
        self._watchdog = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        assert self._watchdog.stdin is not None, "it is a pipe"
        self._watchdog.stdin.write(f"{self.token}\n".encode())
        self._watchdog.stdin.flush()
        self._before = _set_signal_handler(signal.SIGTERM, _interrupt)
        if self._use_fork_server:  # it imports while others prepare
            self._fork_server = self._start_fork_server()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _set_signal_handler(signal.SIGTERM, signal.SIG_IGN)
        before = _set_signal_handler(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of them
        try:
            self.end()
        finally:
            _set_signal_handler(signal.SIGINT, before)
            _set_signal_handler(signal.SIGTERM, self._before)
            if self._watchdog is not None and self._watchdog.stdin is not None:
                self._watchdog.stdin.close()
                self._watchdog.wait(timeout=60)

    def end(self, *names: str, grace: float = 5.0) -> None:
        """End these children with all they started, or the whole family: first asked, after `grace` seconds forced."""
        chosen = [self.children.pop(name) for name in names or list(self.children) if name in self.children]
        if not names:
            if sys.platform == "linux":
                end(self.token)
            if self._fork_server is not None:
                self._fork_server.end()
        _end_process_groups([child.process for child in chosen], grace)

    def start(
        self, name: str, words: Sequence[str], more: Mapping[str, str] | None = None, imports: Sequence[str] = ()
    ) -> ManagedProcess:
        """Start a process of this name, in a session of its own.

        Args:
            name: of the child, and of its log.
            words: the command.
            more: what it sees besides the family's environment.
            imports: modules that it will want; a nursery imports them once.
        """
        log = self._logs / f"{name}.log"
        starts = self.children[name].starts + 1 if name in self.children else 1
        process = (self._fork if self._use_fork_server else self._spawn)(
            name, list(words), log, dict(more or {}), list(imports)
        )
        self.children[name] = ManagedProcess(name, words, log, process, starts, more or {}, imports)
        return self.children[name]

    def restart(self, name: str) -> ManagedProcess:
        """Start a child that ended once more."""
        child = self.children[name]
        _end_process_groups([child.process])
        return self.start(name, child.words, child.more, child.imports)

    def _spawn(
        self, _name: str, words: list[str], log: Path, more: dict[str, str], _imports: list[str]
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment, **more},
                start_new_session=True,
            )

    def _fork(self, name: str, words: list[str], log: Path, more: dict[str, str], imports: list[str]) -> ForkedProcess:
        for _ in range(2):  # a nursery that was killed is replaced
            if self._fork_server is None:
                self._fork_server = self._start_fork_server()
            forked = self._fork_server.start(name=name, words=words, log=str(log), environment=more, imports=imports)
            if forked is not None:
                return forked
            self._fork_server = None
        raise SilotuneError(f"{name}: cannot be started (see {self._logs / 'nursery.log'})")

    def _start_fork_server(self) -> ForkServer:
        return ForkServer(self._logs / "nursery.log", self.environment)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Being told to end is as Ctrl-C."""
    raise KeyboardInterrupt


def _set_signal_handler(number: signal.Signals, handler: Any) -> Any:
    """Set what a signal does; what it did before. Only the main thread may, elsewhere nothing changes."""
    if handler is None or threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(number, handler)


def _end_process_groups(processes: Sequence[subprocess.Popen[bytes] | ForkedProcess], grace: float = 5.0) -> None:
    """End processes and their groups: first asked, after `grace` seconds forced.

    One that was forked a moment ago has no group of its own yet: it is asked by itself, too.
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
    """Whether a process is there, or anything of its group."""
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return process.poll() is None
    return True


def free_ports(count: int) -> list[int]:
    """Ports on 127.0.0.1 that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [found.getsockname()[1] for found in sockets]


def wait_for_port(child: ManagedProcess, port: int, seconds: float) -> None:
    """Wait until a child listens.

    Raises:
        SilotuneError: it ended, or does not listen in time.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not child.alive:
            raise SilotuneError(f"{child.name} ended with code {child.process.returncode}: {child.tail()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise SilotuneError(f"{child.name} does not listen after {seconds:g} s: {child.tail()}")
