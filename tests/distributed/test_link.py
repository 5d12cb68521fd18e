"""`FlowerLink` over a grid whose silos upload late, never, or nonsense."""

from __future__ import annotations

import time
from threading import Event

import pytest
from flwr.app import Error, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from silotune.distributed.flower.link import ConnectionLost, FlowerLink, wrap


@pytest.fixture(autouse=True)
def _identity(monkeypatch):
    """Flower's messages name the task that makes them."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Replies by message id: a reply, an error to raise, or an event to wait for as an unfinished upload does."""

    def __init__(self, **replies):
        self.replies = replies
        self.reachable = True
        self.asked = []

    def get_nodes(self):
        if not self.reachable:
            raise ConnectionError("refused")
        return []

    def pull_messages(self, message_ids):
        (message_id,) = message_ids
        self.asked.append(message_id)
        if not self.reachable:
            raise ConnectionError("refused")
        reply = self.replies.get(message_id)
        if isinstance(reply, Event):
            reply.wait(30)
            return []
        if isinstance(reply, Exception):
            raise reply
        return [] if reply is None else [reply]


def message(**content):
    request = Message(RecordDict(), 1, MessageType.QUERY)
    request.metadata.__dict__["_message_id"] = "m"
    return Message(reply_to=request, **content)


def arrivals(link, ids, wanted, seconds=5.0):
    """Poll as the dispatcher does until `wanted` replies are there."""
    until, come = time.monotonic() + seconds, {}
    while len(come) < wanted and time.monotonic() < until:
        come |= {arrival.message_id: arrival for arrival in link.pull([i for i in ids if i not in come])}
        time.sleep(0.01)
    return come


def test_an_upload_that_never_ends_delays_no_other_reply():
    upload = Event()
    grid = Grid(stuck=upload, done=message(content=wrap(b"frame")))
    link = FlowerLink(grid)
    began = time.monotonic()
    come = arrivals(link, ["stuck", "done"], 1)
    assert come["done"].data == b"frame"
    assert time.monotonic() - began < 2
    assert link.pull(["stuck"]) == []
    assert link.pull([]) == []  # the deadline is over
    upload.set()
    assert grid.asked.count("stuck") == 1


def test_a_reply_that_cannot_be_read_costs_the_silo_its_own_answer():
    grid = Grid(bad=KeyError("class"), empty=message(content=RecordDict()), failed=message(error=Error(8, "gone")))
    come = arrivals(FlowerLink(grid), ["bad", "empty", "failed"], 3)
    assert come["bad"].error == "unreadable reply (KeyError: 'class')"
    assert come["empty"].error == "a message without a frame"
    assert come["failed"].error == "Flower's error 8: gone"


def test_a_lost_connection_ends_the_run():
    grid = Grid()
    link = FlowerLink(grid)
    assert link.pull(["m"]) == []
    grid.reachable = False
    with pytest.raises(ConnectionLost, match="refused"):
        arrivals(link, ["m"], 1)


def test_polls_end_with_the_request():
    grid = Grid()
    link = FlowerLink(grid)
    link.pull(["m"])
    time.sleep(0.3)
    assert 2 <= grid.asked.count("m") <= 5
    link.pull([])
    asked = len(grid.asked)
    time.sleep(0.3)
    assert len(grid.asked) <= asked + 1
