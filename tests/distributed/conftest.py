"""Small runs over sessions in this process, and short paths for sockets."""

from __future__ import annotations

import os
import signal
import tempfile
from functools import cache
from pathlib import Path

import pytest

from silotune.distributed.coordinator import dispatcher
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from silotune.training.local_trainer import LocalTrainer
from tests.support.deployed import Deployed
from tests.support.malicious import CAPS, Malicious
from tests.support.processes import begin, processes
from tests.support.session_rig import local_configs
from tests.support.tiny import tiny_overrides


@pytest.fixture(autouse=True, scope="module")
def _quick():
    """Nothing here takes time to arrive."""
    with pytest.MonkeyPatch.context() as patch:
        for interval in ("POLL_INTERVAL", "NODES_INTERVAL", "RETRY_DELAY"):
            patch.setattr(dispatcher, interval, 0.0)
        yield


@pytest.fixture(scope="session")
def tiny_config(small_backbone, data_folder):
    """As that of `tests.support.fixtures`, over one block: messages, ledgers and approvals do not depend on depth."""
    return lambda method, *words: read_config("demo", [*tiny_overrides(method, small_backbone, data_folder), *words])


@pytest.fixture(scope="session")
def in_one_process(tiny_config, tmp_path_factory):
    """`in_one_process(method, …)` → a finished run in one process, which `federation.…` does not change; made once."""

    @cache
    def made(*words):
        return run(tiny_config(*words), out=tmp_path_factory.mktemp("whole") / "run")

    return lambda *words: made(*(word for word in words if not word.startswith("federation.")))


@pytest.fixture(scope="session")
def whole(tiny_config, in_one_process):
    """`whole(method, …)` → a configuration of three rounds, if no word says else, and its summary in one process."""

    def summary(method, *words):
        words = (method, "rounds=3", "train.steps=2", *words)
        return tiny_config(*words), in_one_process(*words).summary

    return summary


@pytest.fixture
def trained(monkeypatch):
    """The names of silos in the order in which they trained."""
    names, rounds = [], LocalTrainer.rounds
    monkeypatch.setattr(
        LocalTrainer,
        "rounds",
        lambda self, silos, *a: names.extend(silo.name for silo in silos) or rounds(self, silos, *a),
    )
    return names


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
