"""`FlowerLink` over a grid whose silos upload late, never, or nonsense."""

from __future__ import annotations

import time
from functools import partial
from threading import Event

import pytest
from flwr.app import Error, Message, MessageType, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid

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


class Client:
    """Flower's client of the Runtime API; a reply has pieces of 100 bytes, of which the last is never uploaded."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.pulled = []

    def PullMessages(self, _request):
        metadata = Metadata(1, "reply", 2, 1, "m", "", time.time(), 60.0, MessageType.QUERY)
        proto = message_to_proto(make_message(metadata, content=RecordDict()))
        tree = ObjectTree(object_id="0", children=[ObjectTree(object_id=str(n + 1)) for n in range(self.pieces)])
        return PullAppMessagesResponse(messages_list=[proto], message_object_trees=[tree])

    def PullObject(self, request):
        self.pulled.append(time.monotonic())
        there = request.object_id != str(self.pieces)
        return PullObjectResponse(object_found=True, object_available=there, object_content=b"0" * 100 * there)


@pytest.fixture
def _impatient(monkeypatch):
    """Flower asks for a missing piece after 0.05 s, not after a second."""
    monkeypatch.setattr(http_grid, "pull_objects", partial(http_grid.pull_objects, initial_backoff=0.05))


def grid_over(client):
    """Flower's own grid, over another client."""
    grid = http_grid.HttpGrid("127.0.0.1:1", insecure=True, token="t")
    grid.set_run(Run.create_empty(1))
    grid._client = client
    return grid


def test_a_reply_that_is_too_large_is_pulled_no_further():
    client = Client(50)
    link = FlowerLink(grid_over(client))
    link.largest_reply = 1000
    come = arrivals(link, ["m"], 1, seconds=30)
    assert come["m"].too_large
    assert come["m"].error == "a reply of more than 1,000 bytes is too large"
    assert len(client.pulled) < 50


@pytest.mark.usefixtures("_impatient")
def test_an_abandoned_pull_ends_with_its_next_piece():
    client = Client(1)
    link = FlowerLink(grid_over(client))
    assert link.pull(["m"]) == []
    (pull,) = link._pulls.values()
    while len(client.pulled) < 3:  # it waits for a piece that is announced
        time.sleep(0.05)
    assert pull.is_alive()
    link.pull([])
    pull.join(5)
    assert not pull.is_alive()
