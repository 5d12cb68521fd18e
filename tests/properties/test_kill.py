"""A run killed by `kill -9` resumes to the same bits; `test_crash.py` crashes it before every change of a file."""

from __future__ import annotations

import multiprocessing
import signal
import time
from pathlib import Path
from typing import Any

from silotune.core.workers import Workers
from silotune.runs.build.resolve import read_config
from silotune.runs.engines import multi_process
from silotune.runs.run import run
from tests.support.method_cases import same


def trained(words: list[str], out: Path) -> None:
    """In a process of its own: a run, as the command does it after its imports."""
    run(read_config("demo", words), out=out)


def test_killed_amid_its_training_and_resumed(federate, tmp_path):
    """One kill after the second of six checkpoints, of a forked process."""
    out, rounds = tmp_path / "run", "rounds=6"
    forked: Any = multiprocessing.get_context("forkserver")
    Workers(2).begin(multi_process.IMPORTS)
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
