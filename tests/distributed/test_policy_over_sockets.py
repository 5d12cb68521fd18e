"""The attacks of the review on a worker of its own, over its socket and the default backbone: what comes back."""

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


FULL = ("method=fedavg", "method.adapters=1", "tuner=full", "train.optimizer=sgd", "train.steps=1",
        "train.batch_size=1", "train.lr=1.0")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        *(((*FULL, f"seed={seed}"), "refuses tuner=full") for seed in (1, 2, 3)),
        (("uplink=clip,laplace", "uplink.clip=1000", "uplink.epsilon=1e12"), "refuses uplink.epsilon="),
        (("tuner.r=384",), "(384 × 384); it has the shape of a weight matrix of the backbone"),
        (("tuner.r=200",), "numbers in a message; at most"),
        (("train.epochs=1000000",), "train.epochs=1,000,000; at most 20"),
    ],
)
def test_the_attacks_are_refused_by_name(worker, words, refused):
    reply = attacked(worker, *words).ask("round")
    assert (reply.kind, reply.blobs) == ("refused", {})
    assert refused in reply.fields["reason"]
    until = time.monotonic() + 30
    while ping(worker)["busy"]:  # it writes its log after the reply
        assert time.monotonic() < until


def test_an_honest_run_is_answered_and_scores_end(worker):
    attacker = attacked(worker, "rounds=1")
    answer = attacker.ask("round")
    assert (answer.kind, answer.fields["metrics"]) == ("answer", {})
    reasons = [attacker.reason("score", broadcast=attacker.broadcast(add=step * 1e-6)) for step in range(13)]
    assert reasons[:12] == [""] * 12
    assert "more score requests in this run; at most 12 (policy.scores)" in reasons[12]
    assert decode(ask_worker(worker, Frame("ping").encode(), 5)).kind == "pong"
