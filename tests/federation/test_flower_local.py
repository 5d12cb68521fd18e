"""Real processes: SuperLink, SuperNodes and workers on 127.0.0.1, against the same run in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from silotune.config import dump
from silotune.experiment import run
from silotune.federation.watchdog import TOKEN

SAME = ("shared_sha256", "state_sha256", "silos", "global", "average", "best_round", "bytes_up", "bytes_down", "tasks")
LONGEST = 900
"""Seconds: the machine may be busy."""


def processes(out: Path) -> list[int]:
    """All living processes that a run in this folder has started: they carry the folder, or its scratch, in a command
    line, or a family's token in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if int(entry.name) != os.getpid() and (
            str(out).encode() in command or f"TEST_RUN={out}".encode() in environment
        ):
            found.append(int(entry.name))
    return found


@pytest.fixture
def start(tmp_path):
    """`start(config, …)` → the real command under way; whatever is left of it is ended after the test."""
    begun = []

    def command(config, *more):
        file = tmp_path / "run.yaml"
        file.write_text(dump(config), encoding="utf-8")
        out = tmp_path / "run"
        words = [sys.executable, "-m", "silotune", "run", str(file), "--out", str(out), "--engine", "flower-local"]
        environment = os.environ | {"TEST_RUN": str(out), "OMP_NUM_THREADS": "1"}
        environment.pop(TOKEN, None)
        process = subprocess.Popen(
            [*words, *more],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        begun.append((process, out))
        return process, out

    yield command
    for process, out in begun:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)
        for left in processes(out):
            os.kill(left, signal.SIGKILL)


def finish(process) -> str:
    said, _ = process.communicate(timeout=LONGEST)
    return said


def assert_nothing_is_left(out: Path) -> None:
    until = time.monotonic() + 60
    while processes(out) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes(out) == []


def assert_same(start, config, tmp_path) -> None:
    expected = run(config, out=tmp_path / "whole").summary
    process, out = start(config)
    said = finish(process)
    assert process.returncode == 0, said
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert {key: summary[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert summary["engine"] == "flower-local"
    assert summary.keys() == expected.keys()
    assert_nothing_is_left(out)


def test_flower_local_ends_with_the_bits_of_one_process(start, tiny_config, tmp_path):
    assert_same(start, tiny_config("fedmcp", "rounds=2", "train.steps=2"), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedavg", "fedmcp", "fedrep", "fedfame", "fedprompt", "feddpa-t"])
def test_flower_local_for_every_method(start, tiny_config, tmp_path, method):
    assert_same(start, tiny_config(method, "rounds=3"), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_run_that_is_ended_and_it_resumes(start, tiny_config, tmp_path, number):
    """Ended in round 2, once by `kill -9`; the resumed run ends with the same bits."""
    config = tiny_config("fedmcp", "rounds=4")
    expected = run(config, out=tmp_path / "whole").summary
    process, out = start(config)
    until = time.monotonic() + LONGEST
    while not (out / "checkpoints" / "round-0001.json").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    finish(process)
    assert process.returncode in (130, -number)
    assert_nothing_is_left(out)
    process, out = start(config, "--resume")
    said = finish(process)
    assert process.returncode == 0, said
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert {key: summary[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert_nothing_is_left(out)


def test_bad_input_starts_nothing(start, tiny_config, tmp_path):
    process, out = start(tiny_config("centralised"))
    said = finish(process)
    assert process.returncode == 2
    assert "method=centralised" in said
    assert not out.exists()
