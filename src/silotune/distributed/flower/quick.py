"""Runs Flower's commands with shorter waits, in this process or in one that is forked from it.

Flower's processes ask each other for work at fixed times, and start Python anew for every message, which imports Flower
for a second or two. Here they ask soon while messages come and go, and seldom later (`Pauses`); a SuperNode rings for
its SuperExec, which so need not ask; and a SuperExec has imported what it forks for a message. It runs no other thread
but Flower's look at its parent, so that forking is safe.

What this touches of Flower 1.42 (pinned in `pyproject.toml`; `tests/distributed/test_quick.py` fails where one of these
is another):

* the functions behind Flower's commands, `COMMANDS`;
* `flwr.supercore.inflatable.inflatable_utils`: the default `initial_backoff` of `pull_objects` and
  `pull_and_inflate_object_from_tree`, 1 s, becomes `BACKOFF`;
* `flwr.supernode.start_client_internal`: its module `time`, whose `sleep` is called with 3 between polls for messages
  and with 0.5 while one is at work; its module `subprocess`, whose `Popen` starts the SuperExec; its `_push_messages`,
  which is called once for each message that came;
* `flwr.supercore.superexec.run_superexec`: its module `time`, whose `sleep` is called between polls for tasks;
* `flwr.supercore.superexec.executor.subprocess_executor`: its module `subprocess`, whose `Popen` starts a command for
  each message.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

FIRST, FRACTION = 1 / 30, 0.2
"""The first pause between two questions, of Flower's own; later ones, of the time that a process has waited so far."""

LOOK, LATE, SELDOM = 3, 1 / 30, 10.0
"""Flower's seconds between a node's looks for messages; the longer pause, of the time without one; and its most."""

BACKOFF = 0.1
"""Seconds before objects that were not there yet are asked for again."""

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

CLIENT = ("flwr.supernode.cli", "silotune.distributed.flower.client_app")
"""Modules that a process for a message needs."""

FORKS = sys.platform == "linux"

_BELL = "bell"


def pause(waited: float, least: float, most: float) -> float:
    """Return the seconds before the next question, of one that has been asked for so long."""
    return max(least, min(most, FRACTION * waited))


class Pauses:
    """Pauses between questions, which grow with the time that a process has waited for the same, up to Flower's own."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, 0.0

    def begin(self) -> None:
        """Begin to wait for something else, which also another number of seconds does."""
        self._seconds = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep for Flower's seconds, or less; longer, where a node has looked for a message for minutes."""
        now = time.monotonic()
        if seconds != self._seconds:
            self._seconds, self._since = seconds, now
        waited = now - self._since
        most = max(seconds, min(LATE * waited, SELDOM)) if seconds == LOOK else seconds
        time.sleep(pause(waited, FIRST * seconds, most))


class Bell:
    """Wakes a SuperExec when its SuperNode has a message: a socket in the folder that both have as Flower's home."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._heard = False
        with contextlib.suppress(OSError):  # the path is too long: it is not rung, and asks
            path = _bell_path()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))
            self._heard = True

    def sleep(self, seconds: float) -> None:
        """Sleep until it is rung, or for so many seconds; where nobody can ring, for a second at most."""
        if not self._heard:
            time.sleep(min(seconds, 1.0))
        elif select.select([self._socket], [], [], seconds)[0]:
            self._socket.recv(1)

    @staticmethod
    def ring() -> None:
        """Wake the SuperExec, if there is one."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ringing:
            ringing.setblocking(False)
            ringing.sendto(b"1", str(_bell_path()))


def _bell_path() -> Path:
    return Path(os.environ["FLWR_HOME"]) / _BELL


def fork(command: Sequence[str], configure: Callable[[], None] = lambda: None) -> int:
    """Fork a process that runs one of the commands, and return its id."""
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
        if not FORKS:
            words = list(command) if command[0] == sys.executable else [sys.executable, "-m", __name__, *command]
            os.execv(words[0], words)
        run(command)
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


def run(command: Sequence[str]) -> None:
    """Run one of the commands in this process, with shorter waits."""
    sys.argv = list(command)
    if command[0] in _CHANGES:
        _CHANGES[command[0]]()
    name, _, function = COMMANDS[command[0]].partition(":")
    getattr(importlib.import_module(name), function)()


def change_pulls() -> None:
    """Ask sooner for objects that are not there yet."""
    pulls: Any = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    for function in (pulls.pull_objects, pulls.pull_and_inflate_object_from_tree):
        function.__kwdefaults__["initial_backoff"] = BACKOFF


def _change_supernode() -> None:
    change_pulls()
    loop: Any = importlib.import_module("flwr.supernode.start_client_internal")
    pauses, push = Pauses(), loop._push_messages

    def answer(**fields: Any) -> None:
        """Push the reply to a message that has come, when it is there."""
        Bell.ring()
        pauses.begin()
        push(**fields)

    loop._push_messages = answer
    loop.time = SimpleNamespace(sleep=pauses.sleep)
    loop.subprocess = SimpleNamespace(Popen=lambda words: subprocess.Popen([sys.executable, "-m", __name__, *words]))


def _change_superexec() -> None:
    loop: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
    executor: Any = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    loop.time = SimpleNamespace(sleep=Bell().sleep)
    if FORKS:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit codes of messages' processes are not collected
        executor.subprocess = SimpleNamespace(Popen=lambda command, **_: fork(command), DEVNULL=None)


_CHANGES = {"flower-supernode": _change_supernode, "flower-superexec": _change_superexec}


def main() -> None:
    """Run the command of this process's arguments, as a SuperNode starts it: a SuperExec for its messages."""
    change_pulls()
    for module in CLIENT if FORKS else ():
        importlib.import_module(module)
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
