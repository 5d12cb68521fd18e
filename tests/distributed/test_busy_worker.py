"""A worker that trains answers a greeting it knows, and reads no frame above its limit."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from silotune.core.records import check_audit
from silotune.distributed.protocol.frames import Frame, ProtocolError, ask_worker, decode
from silotune.distributed.silo import worker
from silotune.distributed.silo.approvals import Approvals
from silotune.distributed.silo.session import Session
from silotune.distributed.silo.worker import WorkerMetrics
from tests.support.session_rig import federate, local_configs


def greeting_of(link):
    return next(data for node, data in link.sent if node == 0 and decode(data).kind == "hello")


@pytest.fixture(scope="module")
def greeted(tiny_config, tmp_path_factory):
    """A silo's settings after a run, and the greeting it got."""
    out = tmp_path_factory.mktemp("busy") / "run"
    config = tiny_config("fedmcp", "rounds=1", "train.steps=1")
    _, link = federate(config, out)
    return local_configs(config, out)["alpha"], greeting_of(link)


def test_a_known_hello_is_the_same_and_recorded(greeted):
    settings, greeting = greeted
    session = Session(settings)
    assert session.known_hello(greeting) is None  # a new worker knows none
    reply = session.answer(greeting)
    assert decode(reply).kind == "hello"
    assert session.known_hello(greeting) == reply
    assert session.known_hello(greeting + b" ") is None
    entries, problems = check_audit(Path(settings.folder))
    assert problems == []
    assert [entry["kind"] for entry in entries[-2:]] == ["hello", "hello"]


def test_it_is_answered_over_the_socket_while_the_main_thread_works(greeted, tmp_path):
    settings, greeting = greeted
    session = Session(settings)
    reply = session.answer(greeting)
    path = tmp_path / "worker.sock"
    listener = worker._listen(path)
    metrics = WorkerMetrics(settings)
    busy = worker._Worker(settings, busy="working", session=session, metrics=metrics)
    threading.Thread(target=worker._accept, args=(listener, busy), daemon=True).start()
    assert ask_worker(path, greeting, 5) == reply
    assert worker.ping(path)["busy"] == "working"
    with pytest.raises(ProtocolError):  # another greeting waits for the main thread
        ask_worker(path, Frame("hello", {"run": "other"}).encode(), 0.2)
    listener.close()
    (requests,) = [measure for measure in metrics.measures() if measure.name == "silotune_worker_requests"]
    answered = {"kind": "hello", "outcome": "answered"}
    assert [sample.value for sample in requests.samples if sample.labels == answered] == [1]


def test_an_operator_who_rejects_the_run_is_heard_while_it_trains(tiny_config, tmp_path):
    config = tiny_config("fedmcp", "rounds=1", "train.steps=1")
    _, link = federate(config, tmp_path / "run")
    greeting = greeting_of(link)
    settings = local_configs(config, tmp_path / "asked", approval="ask")["alpha"]
    session, approvals = Session(settings), Approvals(Path(settings.folder))
    assert decode(session.answer(greeting)).kind == "waiting"
    (asked,) = approvals.all()
    approvals.decide(asked.name, "approved")
    reply = session.answer(greeting)
    assert session.known_hello(greeting) == reply
    approvals.decide(asked.name, "rejected")
    assert session.known_hello(greeting) is None
