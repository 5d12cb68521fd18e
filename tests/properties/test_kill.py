"""A command killed by `kill -9` at any moment resumes to the same final bits."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from silotune.runs.build.resolve import read_config
from silotune.runs.engines import multi_process
from silotune.runs.run import run
from tests.support.method_cases import Federate, same

ROUNDS = 12


def command(federate: Federate, case: str, out: Path, *more: str) -> list[str]:
    words = federate.words(case, f"rounds={ROUNDS}")
    return [sys.executable, "-m", "silotune", "run", "demo", *words, "--out", str(out), *more]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def start(words: list[str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet, env=environment())


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the file exists or the process has ended."""
    while not path.exists() and process.poll() is None:
        time.sleep(0.0005)


def killed(words: list[str], until: Path | None, delay: float) -> int:
    """Start the command, wait for `until` and `delay` seconds more, kill it; returns the exit code, −9 if killed."""
    process = start(words)
    try:
        if until is not None:
            wait_for(until, process)
        time.sleep(delay)
    finally:
        process.send_signal(signal.SIGKILL)
    return process.wait()


@pytest.fixture(scope="module")
def whole(federate, tmp_path_factory):
    """`whole(case)` → the summary of a run in this process that nothing interrupted."""
    made = {}

    def summary(case: str) -> dict[str, object]:
        if case not in made:
            made[case] = federate.run(case, tmp_path_factory.mktemp("whole") / "run", f"rounds={ROUNDS}").summary
        return made[case]

    return summary


def trained(words: list[str], out: Path) -> None:
    """In a process of its own: a run, as the command does it after its imports."""
    run(read_config("demo", words), out=out)


def test_killed_amid_its_training_and_resumed(federate, tmp_path):
    """One kill after the second of six checkpoints, of a forked process; the long test kills commands, and has more."""
    out, rounds = tmp_path / "run", "rounds=6"
    forked: Any = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload([multi_process.__name__, "silotune.core.frozen_imports"])
    process = forked.Process(target=trained, args=(federate.words("fedmcp", rounds), out))
    process.start()
    try:
        while not (out / "checkpoints" / "round-0002.json").exists() and process.is_alive():
            time.sleep(0.0005)
        time.sleep(0.02)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (out / "summary.json").exists()
    reports = []
    resumed = federate.run("fedmcp", out, rounds, resume=True, progress=lambda *what: reports.append(what))
    assert 3 <= reports[0][0] <= 6
    assert same(resumed.summary) == same(federate.run("fedmcp", tmp_path / "whole", rounds).summary)
