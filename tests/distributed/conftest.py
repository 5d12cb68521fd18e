"""Small runs over sessions in this process, and short paths for sockets."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from silotune.distributed.coordinator import dispatcher
from silotune.distributed.silo.silo_config import SiloSettings
from tests.support.malicious import CAPS, Malicious
from tests.support.processes import begin, processes
from tests.support.session_rig import local_configs


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


@pytest.fixture
def deployed():
    """A federation on this machine whose processes end with the test; nothing is started."""
    from tests.support.deployed import Deployed

    with tempfile.TemporaryDirectory(prefix="st-") as folder:
        deployment = Deployed(Path(folder))
        try:
            yield deployment
        finally:
            deployment.end()


@pytest.fixture
def attack(tiny_config, tmp_path):
    """`attack(words, **settings)` → a malicious coordinator and a silo with the policy `CAPS`, `policy` over them."""

    def begin(words, run="0" * 16, changes=None, caps=True, **settings):
        method, *more = words
        config = tiny_config(method, *more)
        local = local_configs(config, tmp_path / "silo")["alpha"]
        fields = local.model_dump() | {"approval": "policy"} | settings
        fields["policy"] = (CAPS if caps else {}) | settings.get("policy", {})
        fields = {key: value for key, value in fields.items() if value is not None}
        return Malicious(SiloSettings(**fields), config, run, changes or {})

    return begin
