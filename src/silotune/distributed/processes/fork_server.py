"""Fork server: imports the libraries once, forks Flower's processes and workers, and patches Flower to poll faster.

A run on one machine starts a dozen processes, and Flower one more per message; each would spend seconds importing
Flower and torch. `python -m silotune.distributed.processes.fork_server` reads orders from its standard input, one
JSON object per line. It writes the id of the process forked for each order, and later its exit code, to its standard
output. It has one thread and runs no tensor operation, so that forking is safe. Linux only; elsewhere the same
commands are started as new processes.

Flower's commands (version 1.41, pinned in `pyproject.toml`) are patched in three places: `flower-supernode` polls for
messages every `PAUSE` instead of every 3 s; objects that are not available yet are requested again after `PAUSE`
instead of 1 s; `flower-superexec` forks itself for each message instead of starting a command.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

PAUSE = 0.1
"""Seconds between polls of Flower's processes on this machine."""

_REAP_INTERVAL = 0.1
"""Seconds between checks for ended processes."""

COMMANDS = {
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "flwr.supernode.cli:flower_supernode",
    "flower-superexec": "flwr.supercore.cli:flower_superexec",
    "flwr-clientapp": "flwr.supernode.cli:flwr_clientapp",
    "flwr-serverapp": "flwr.superlink.cli:flwr_serverapp",
    "flwr": "flwr.cli.app:app",
    "silotune.distributed.silo.worker": "silotune.distributed.silo.worker:main",
}
"""First word of a command line → module and function that run the command."""


def main() -> None:
    """Fork a process for each order until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _patch_pull_backoff()
    orders, forked = sys.stdin.fileno(), set[int]()
    buffer = b""
    while True:
        ready, _, _ = select.select([orders], [], [], _REAP_INTERVAL)
        if ready:
            chunk = os.read(orders, 2**16)
            if not chunk:
                return
            buffer += chunk
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            forked.add(_start(json.loads(line)))
        for pid in list(forked):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                forked.discard(pid)
                _report(ended=pid, code=os.waitstatus_to_exitcode(status))


def _start(order: dict[str, Any]) -> int:
    """Fork the process that an order describes; returns its id."""
    for module in order["imports"]:
        importlib.import_module(module)
    command = _without_interpreter(order["command"])
    importlib.import_module(COMMANDS[command[0]].partition(":")[0])
    gc.collect()
    gc.freeze()  # keeps pages shared: the children's collectors do not touch these objects
    pid = fork(command, lambda: _configure(order))
    _report(started=pid)
    return pid


def _without_interpreter(command: list[str]) -> list[str]:
    """Drop `python -m` from a command line."""
    return command[2:] if command[1:2] == ["-m"] else command


def _report(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _configure(order: dict[str, Any]) -> None:
    """Give a forked process its own session, log, environment and name."""
    os.setsid()
    empty = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, empty), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.update(order["environment"])
    Path("/proc/self/comm").write_text(str(order["name"])[:15], encoding="utf-8")


def fork(command: Sequence[str], configure: Callable[[], None] = lambda: None) -> int:
    """Fork a process that runs one of the commands.

    Args:
        command: the command line; its first word is a key of `COMMANDS`.
        configure: called in the new process before the command.

    Returns:
        The process id.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run(command, configure)
    return pid


def _run(command: Sequence[str], configure: Callable[[], None]) -> NoReturn:
    code: Any = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        configure()
        sys.argv = list(command)
        if command[0] in _PATCHES:
            _PATCHES[command[0]]()
        name, _, function = COMMANDS[command[0]].partition(":")
        getattr(importlib.import_module(name), function)()
        code = 0
    except SystemExit as exit:
        code = exit.code
        if not isinstance(code, int | None):  # as the interpreter does
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _patch_pull_backoff() -> None:
    pulls: Any = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    for function in (pulls.pull_objects, pulls.pull_and_inflate_object_from_tree):
        function.__kwdefaults__["initial_backoff"] = PAUSE


def _patch_supernode_polling() -> None:
    loop: Any = importlib.import_module("flwr.supernode.start_client_internal")
    loop.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, PAUSE)))


def _patch_superexec_fork() -> None:
    executor: Any = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit codes of messages' processes are not collected
    executor.subprocess = SimpleNamespace(Popen=lambda command, **_: fork(command), DEVNULL=None)


_PATCHES = {"flower-supernode": _patch_supernode_polling, "flower-superexec": _patch_superexec_fork}


if __name__ == "__main__":
    main()
