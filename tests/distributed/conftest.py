"""Small runs over sessions in this process, and short paths for sockets."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from silotune.distributed.coordinator import dispatcher
from tests.support.processes import begin, processes


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Nothing here takes time to arrive."""
    monkeypatch.setattr(dispatcher, "POLL_INTERVAL", 0.0)
    monkeypatch.setattr(dispatcher, "NODES_INTERVAL", 0.0)
    monkeypatch.setattr(dispatcher, "RETRY_DELAY", 0.0)


@pytest.fixture
def short():
    """A folder whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="st-") as folder:
        yield Path(folder)


@pytest.fixture
def start(tmp_path):
    """`start(config, …)` → the real command under way, and its run folder; whatever is left of it is ended after the
    test."""
    begun = []

    def command(config, *more):
        begun.append(begin(config, tmp_path, *more))
        return begun[-1]

    yield command
    for process, out in begun:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)
        for left in processes(out):
            os.kill(left, signal.SIGKILL)
