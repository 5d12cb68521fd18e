"""What is nobody's bad input, and no bug either: one line, and exit code 1 or, after Ctrl-C, 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from silotune.cli.termination import ended_by_sigterm
from tests.support.command_line import Silotune


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError(), "out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "train.batch_size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried …"), "train.batch_size"),
    ],
)
def test_the_machine_has_no_more(silotune: Silotune, monkeypatch, error: Exception, said: str) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("silotune.cli.live_view.watch_run", failing)
    outcome = silotune("watch", ".")
    assert outcome.code == 1
    assert said in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1


INTERRUPTED = "silotune: interrupted; what is finished is kept (run again with --resume)"

PRESSED = """
import os, signal, sys, weakref

def press(event, args):
    global kept
    if event == "import" and args[0] == MODULE and kept is not None:
        kept = None if DROPPED else os.kill(os.getpid(), signal.SIGINT)

class Kept:
    pass

def dropped(_):
    raise KeyboardInterrupt  # Python prints errors of such a callback and goes on

signal.signal(signal.SIGINT, signal.default_int_handler)
kept = Kept()
reference = weakref.ref(kept, dropped if DROPPED else None)
sys.addaudithook(press)
sys.argv = ["silotune", "methods", "--json"]
from silotune.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("module", "dropped"),
    [
        ("silotune.cli.app", False),
        pytest.param("click", True, marks=pytest.mark.long),
        *(pytest.param(name, False, marks=pytest.mark.long) for name in ("click", "typer", "rich.console", "pydantic")),
        *(pytest.param(name, False, marks=pytest.mark.long) for name in ("torch", "torch._C", "silotune.methods")),
    ],
)
def test_ctrl_c_while_a_module_is_imported(module: str, dropped: bool) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", f"MODULE, DROPPED = {module!r}, {dropped!r}\n{PRESSED}"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", f"{INTERRUPTED}\n")


@pytest.mark.parametrize("error", [RecursionError("maximum recursion depth exceeded"), ImportError("failed to import")])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_error_in_place_of_an_interruption(silotune: Silotune, monkeypatch, error, number, code) -> None:
    """NumPy imports a module of its own without end when a Ctrl-C falls into that import; pydantic has SchemaError."""

    def failing(*_: object, **__: object) -> None:
        with suppress(KeyboardInterrupt), ended_by_sigterm():
            signal.raise_signal(number)
        raise error

    monkeypatch.setattr("silotune.cli.main._ignore_ctrl_c", lambda: None)
    monkeypatch.setattr("silotune.cli.live_view.watch_run", failing)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
    try:
        outcome = silotune("watch", ".")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    line = INTERRUPTED if code == 130 else INTERRUPTED.replace("interrupted", "terminated")
    assert (outcome.code, outcome.err) == (code, f"{line}\n")
