"""Whoever waits for a coordinator learns how it ended, also where it never began or is gone without a word."""

from __future__ import annotations

import time

import pytest

from silotune.core.files import folder_lock
from silotune.distributed.coordinator import run_status
from silotune.distributed.coordinator.run_status import RunFollower, RunStatus, read_status
from silotune.distributed.protocol.frames import Frame
from silotune.errors import InputError, SilotuneError


@pytest.fixture
def folder(tmp_path):
    """A run folder's part that is about the machines."""
    (tmp_path / "federation").mkdir()
    return tmp_path / "federation"


def test_a_coordinator_that_never_begins_is_not_waited_for_for_ever(folder, monkeypatch):
    """Its ServerApp cannot be imported, say, or was refused before it said a word."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    RunStatus.begin(folder, "submitted")
    follower = RunFollower(folder)
    now[0] = run_status.STARTUP_TIMEOUT
    assert follower.poll().state == "submitted"
    now[0] += 1
    status = follower.poll()
    assert status.state == "lost"
    with pytest.raises(SilotuneError, match=r"^the coordinator has not begun within 600 s "):
        status.require_finished()


def test_one_that_is_gone_without_a_word_is_not_waited_for(folder):
    with folder_lock(folder):
        RunStatus.begin(folder)
        assert RunFollower(folder).poll().state == "working"
    with pytest.raises(SilotuneError, match="process is gone"):
        RunFollower(folder).poll().require_finished()


def test_what_it_does_and_promises_is_told_once(folder):
    heard, said = [], []
    follower = RunFollower(folder, lambda *words: heard.append(words), said.append)
    with folder_lock(folder):
        status = RunStatus.begin(folder)
        status.promise(["ε 3", "δ 1e-5"])
        for step in ((1, "alpha", 0, 2), (1, "alpha", 0, 2), (1, "beta", 1, 2)):
            status.report(*step)
            follower.poll()
        status.end()
    assert heard == [(1, "alpha", 0, 2), (1, "beta", 1, 2)]
    assert said == ["ε 3", "δ 1e-5"]
    ended = follower.poll()
    ended.require_finished()
    assert (ended.state, ended.round) == ("finished", 1)


@pytest.mark.parametrize(
    ("error", "lost", "raised", "message"),
    [
        (InputError("rounds: too many"), False, InputError, "rounds: too many"),
        (SilotuneError("below its quorum"), False, SilotuneError, "below its quorum"),
        (SilotuneError("Flower: ConnectError"), True, SilotuneError, "Flower: ConnectError"),
        (KeyError("accuracy"), False, SilotuneError, "KeyError: 'accuracy'"),
    ],
)
def test_how_it_ended_is_raised(folder, error, lost, raised, message):
    RunStatus.begin(folder).end(error, lost)
    status = RunFollower(folder).poll()
    with pytest.raises(SilotuneError) as caught:
        status.require_finished()
    assert (type(caught.value), str(caught.value)) == (raised, message)
    assert status.state == ("lost" if lost else "failed")


def test_what_the_one_before_said_is_forgotten_and_what_it_counted_is_kept(folder):
    before = RunStatus.begin(folder)
    before.sent("north", "hello", 99)
    before.received("north", Frame("waiting", {"silo": "north"}), 7)
    before.report(1, "", 0, 1)
    before.end(SilotuneError("no"))
    RunStatus.begin(folder, "submitted")
    after = RunFollower(folder).poll()
    assert (after.state, after.error, after.progress) == ("submitted", "", None)
    assert (after.messages_down, after.messages_up, after.bytes_up) == (1, 1, 7)
    assert (after.silos["north"].seen is not None, after.silos["north"].waits) == (True, False)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"silos": {"a": {"more": 1}}}', '{"silos": 3}'])
def test_a_file_that_cannot_be_read_is_no_status(folder, content):
    (folder / "status.json").write_text(content)
    assert read_status(folder) is None
