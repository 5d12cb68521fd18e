"""Caps of a worker of its own, over its socket and the default backbone."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import yaml

from silotune.data.loading import load_silos
from silotune.data.row_folder import write_rows
from silotune.distributed.protocol.frames import Frame, ask_worker, decode
from silotune.distributed.silo.worker import ping
from silotune.runs.build.resolve import read_config
from tests.support.malicious import Malicious

pytestmark = pytest.mark.long

LONGEST = 300
"""Seconds: the machine may be busy."""


class Remote:
    """A worker behind a socket, in place of a session."""

    def __init__(self, path):
        self.path = path

    def answer(self, data):
        return ask_worker(self.path, data, LONGEST)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """A worker with the default policy over the demo's sentiment rows and the default backbone."""
    folder = tmp_path_factory.mktemp("s")
    (data,) = load_silos(read_config("demo", ["data.tasks=[sentiment]"]))
    write_rows(folder / "rows", data)
    tree = {"name": data.name, "folder": "state", "rows": "rows", "share": [], "send": ["global"], "socket": "w.sock"}
    path = folder / "silo.yaml"
    path.write_text(yaml.safe_dump(tree | {"approval": "policy"}), encoding="utf-8")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "silotune", "worker", str(path)], stderr=log)
    try:
        until = time.monotonic() + LONGEST
        while (state := ping(folder / "w.sock")) is None or state["busy"]:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        yield folder / "w.sock"
    finally:
        process.terminate()
        process.wait(timeout=30)


def attacked(socket, *words, run="0" * 16):
    from silotune.distributed.silo.silo_config import read_silo_settings

    config = read_config("demo", ["data.tasks=[sentiment]", "threads=1", "train.batches=even", *words])
    attacker = Malicious(read_silo_settings(socket.with_name("silo.yaml")), config, run)
    attacker.session = Remote(socket)
    return attacker


def test_an_honest_run_is_answered_and_requests_end(worker):
    attacker = attacked(worker, "rounds=1")
    answer = attacker.ask("round")
    assert (answer.kind, answer.fields["metrics"]) == ("answer", {})
    reasons = [attacker.reason(broadcast=attacker.broadcast(add=step * 1e-6)) for step in range(4)]
    assert reasons[:3] == [""] * 3
    assert "requests for round 1; at most 3 (policy.requests_per_round)" in reasons[3]
    assert "numbers in an update; at most" in attacked(worker, "tuner.r=200").reason()
    assert decode(ask_worker(worker, Frame("ping").encode(), 5)).kind == "pong"
