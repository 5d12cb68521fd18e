"""One process that imports what others need, once, and forks them: importing is most of what starting them costs.

A run on one machine starts a dozen processes, and Flower one more per message; each would import Flower, and some
torch, for seconds. `python -m silotune.distributed.processes.fork_server` reads orders from its standard input, one
JSON object per line. It writes to its standard output which process it forked for each order, and how that process
ended. It has one thread and runs no tensor operation, so that forking is safe. Linux only; elsewhere the same commands
are started as new processes.

Flower's commands run with three things changed (they are of version 1.41, which `pyproject.toml` pins):
`flower-supernode` looks for messages every 3 s, here every `PAUSE`; what is not there yet is asked for again after 1 s,
here after `PAUSE`; `flower-superexec` starts a command per message, here it forks itself.
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
"""Seconds between looks of Flower's processes, on this machine."""

_LOOK = 0.1
"""Seconds between looks at what ended."""

_COMMANDS = {
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "flwr.supernode.cli:flower_supernode",
    "flower-superexec": "flwr.supercore.cli:flower_superexec",
    "flwr-clientapp": "flwr.supernode.cli:flwr_clientapp",
    "flwr-serverapp": "flwr.superlink.cli:flwr_serverapp",
    "flwr": "flwr.cli.app:app",
    "silotune.distributed.silo.worker": "silotune.distributed.silo.worker:main",
}


def main() -> None:
    """Fork what is ordered, until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _quick_pulls()
    orders, forked = sys.stdin.fileno(), set[int]()
    said = b""
    while True:
        ready, _, _ = select.select([orders], [], [], _LOOK)
        if ready:
            chunk = os.read(orders, 2**16)
            if not chunk:
                return
            said += chunk
        while b"\n" in said:
            line, said = said.split(b"\n", 1)
            forked.add(_start(json.loads(line)))
        for process in list(forked):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                forked.discard(process)
                _say(ended=process, code=os.waitstatus_to_exitcode(status))


def _start(order: dict[str, Any]) -> int:
    for module in order["imports"]:
        importlib.import_module(module)
    words = _short(order["words"])
    importlib.import_module(_COMMANDS[words[0]].partition(":")[0])
    gc.collect()
    gc.freeze()  # what is there now need not be written to by the children's collectors
    process = fork(words, lambda: _settle(order))
    _say(started=process)
    return process


def _short(words: list[str]) -> list[str]:
    """A command without the interpreter's part of it."""
    return words[2:] if words[1:2] == ["-m"] else words


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _settle(order: dict[str, Any]) -> None:
    """Make a forked process one of its own: session, log, environment."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.update(order["environment"])
    Path("/proc/self/comm").write_text(str(order["name"])[:15], encoding="utf-8")


def fork(words: Sequence[str], settle: Callable[[], None] = lambda: None) -> int:
    """A new process that runs one of the commands; its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        _run(words, settle)
    return process


def _run(words: Sequence[str], settle: Callable[[], None]) -> NoReturn:
    code: Any = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        settle()
        sys.argv = list(words)
        if words[0] in _CHANGED:
            _CHANGED[words[0]]()
        name, _, function = _COMMANDS[words[0]].partition(":")
        getattr(importlib.import_module(name), function)()
        code = 0
    except SystemExit as exit:
        code = exit.code
        if not isinstance(code, int | None):  # the interpreter would say it, too
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _quick_pulls() -> None:
    pulls: Any = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    for function in (pulls.pull_objects, pulls.pull_and_inflate_object_from_tree):
        function.__kwdefaults__["initial_backoff"] = PAUSE


def _quick_supernode() -> None:
    loop: Any = importlib.import_module("flwr.supernode.start_client_internal")
    loop.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, PAUSE)))


def _forking_superexec() -> None:
    executor: Any = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a message's process ended
    executor.subprocess = SimpleNamespace(Popen=lambda words, **_: fork(words), DEVNULL=None)


_CHANGED = {"flower-supernode": _quick_supernode, "flower-superexec": _forking_superexec}


if __name__ == "__main__":
    main()
