"""The command as a process, and the processes that it has started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from silotune.config import Config, dump
from silotune.deploy.processes import end_with_parent
from silotune.runs.storage.readers import read_summary

SAME = ("shared_sha256", "state_sha256", "silos", "global", "average", "best_round", "bytes_up", "bytes_down", "tasks")
LONGEST = 900
"""Seconds: the machine may be busy."""


def processes(out: Path, name: str = "") -> list[int]:
    """All living processes that a run in this folder has started (of one name, as the kernel keeps it): they carry the
    folder in a command line, or in their environment."""
    living = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            comm = (entry / "comm").read_text().strip()
        except OSError:
            continue
        mine = str(out).encode() in command or f"TEST_RUN={out}".encode() in environment.split(b"\0")
        if mine and int(entry.name) != os.getpid() and name in ("", comm):
            living.append(int(entry.name))
    return living


def begin(config: Config, folder: Path, *more: str) -> tuple[subprocess.Popen[str], Path]:
    """Start `silotune run --engine flower-local` below `place`; returns the process and its run folder."""
    file, out = folder / "run.yaml", folder / "run"
    file.write_text(dump(config), encoding="utf-8")
    words = [sys.executable, "-m", "silotune", "run", str(file), "--out", str(out), "--engine", "flower-local", *more]
    environment = os.environ | {"TEST_RUN": str(out), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    return process, out


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LONGEST)
    return output


def finished(process: subprocess.Popen[str], out: Path) -> dict[str, Any]:
    """Wait for the command, which must end well, and return its run's summary."""
    output = finish(process)
    assert process.returncode == 0, output
    return read_summary(out)


def bits(summary: dict[str, Any]) -> dict[str, Any]:
    """Return what ends with the same bits wherever silos are."""
    return {key: summary[key] for key in SAME}


def wait_until(condition, process: subprocess.Popen[str], longest: float = LONGEST) -> None:
    """Wait for a condition while the command runs; fails if it ends."""
    until = time.monotonic() + longest
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "too slow"
        time.sleep(0.02)


def assert_nothing_is_left(out: Path) -> None:
    """Assert that within a minute no process of the run is left."""
    until = time.monotonic() + 60
    while processes(out) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes(out) == []
