"""Starts and ends all processes of a run on this machine, forked from a process that has imported their libraries.

A run on one machine starts a dozen processes, and Flower one more per message; each would spend seconds importing
Flower and torch. `ProcessGroup` starts this file as a process of its own, the server, which forks the others into its
process group and ends the group when its standard input ends, however its starter ended. It has one thread and runs no
tensor operation, so that forking is safe. Linux only; elsewhere it starts the same commands as new processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from silotune.distributed.flower.quick import COMMANDS, FORKS, change_pulls, fork
from silotune.errors import SilotuneError

PAUSE = 0.1
"""Seconds between checks for ended processes."""

GRACE = 2.0
"""Seconds for processes to end by themselves."""


class ProcessGroup:
    """A context in which processes run; all of them end with it, and with this process, even if that is killed."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._environment = environment
        self._ended: dict[str, int] = {}
        self._reports = b""

    def __enter__(self) -> ProcessGroup:
        with (self._logs / "fork-server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "silotune.distributed.local.fork_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                bufsize=0,
            )
        assert self._server.stdin is not None, "it is a pipe"
        assert self._server.stdout is not None, "it is a pipe"
        self._orders, self._replies = self._server.stdin, self._server.stdout
        os.set_blocking(self._replies.fileno(), False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orders.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(2 * GRACE)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left, unless the server was killed
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self._replies.close()

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        """Start a process.

        Args:
            name: the name of the process and of its log.
            command: the command line; its first word, or the module after `python -m`, is a key of `COMMANDS`.
            environment: variables besides those of all processes.
            imports: modules that are imported once for all processes before this one is forked.
        """
        order = {
            "name": name,
            "command": list(command),
            "log": str(self._log(name)),
            "environment": dict(environment or {}),
            "imports": list(imports),
        }
        try:
            self._orders.write(f"{json.dumps(order)}\n".encode())
        except BrokenPipeError:
            self.check()

    def check(self, but: str = "") -> None:
        """Check that every process runs, except one that may have ended."""
        for name, code in self.ended().items():
            if name == but:
                continue
            raise SilotuneError(f"{name} ended with code {code}: {self.output(name)} (run again with --resume)")

    def ended(self) -> dict[str, int]:
        """Return the exit codes of the processes that have ended, by name."""
        while data := self._replies.read(2**16):
            self._reports += data
        *lines, self._reports = self._reports.split(b"\n")
        self._ended.update(json.loads(line) for line in lines)
        if (code := self._server.poll()) is not None:
            self._ended["fork-server"] = code
        return self._ended

    def output(self, name: str, lines: int = 3) -> str:
        """Return the last lines that a process wrote, joined to one."""
        text = self._log(name).read_text(encoding="utf-8", errors="replace") if self._log(name).exists() else ""
        return " | ".join(line.strip() for line in text.strip().splitlines()[-lines:])

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


# -- the server --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Start a process for each order on standard input, report its end, and end all processes when the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if FORKS:
        change_pulls()
    orders, forked, buffer = sys.stdin.fileno(), dict[int, str](), b""
    while True:
        ready, _, _ = select.select([orders], [], [], PAUSE)
        if ready:
            chunk = os.read(orders, 2**16)
            if not chunk:
                break
            buffer += chunk
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            order = json.loads(line)
            forked[_start(order)] = order["name"]
        for pid, code in _reaped(forked):
            sys.stdout.write(json.dumps([forked.pop(pid), code]) + "\n")
            sys.stdout.flush()
    os.killpg(0, signal.SIGTERM)
    until = time.monotonic() + GRACE
    while forked and time.monotonic() < until:
        for pid, _ in _reaped(forked):
            del forked[pid]
        time.sleep(0.02)
    os.killpg(0, signal.SIGKILL)  # also what Flower's processes have forked, and this process


def _reaped(forked: Mapping[int, str]) -> list[tuple[int, int]]:
    """Return id and exit code of the processes that have ended."""
    ended = [os.waitpid(pid, os.WNOHANG) for pid in forked]
    return [(pid, os.waitstatus_to_exitcode(status)) for pid, status in ended if pid]


def _start(order: dict[str, Any]) -> int:
    """Start the process that an order describes; returns its id."""
    command = order["command"]
    if FORKS:
        command = command[2:] if command[1:2] == ["-m"] else command
        for module in order["imports"]:
            importlib.import_module(module)
        importlib.import_module(COMMANDS[command[0]].partition(":")[0])
        gc.collect()
        gc.freeze()  # keeps pages shared: the children's collectors do not touch these objects
    return fork(command, lambda: _configure(order))


def _configure(order: dict[str, Any]) -> None:
    """Give a forked process its log, environment and name."""
    empty = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, empty), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.update(order["environment"])
    if FORKS:
        Path("/proc/self/comm").write_text(str(order["name"])[:15], encoding="utf-8")


if __name__ == "__main__":
    main()
