"""Whoever waits for a coordinator learns how it ended, also where it never began or is gone without a word."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from silotune.distributed.coordinator import status_files
from silotune.errors import InputError, SilotuneError


@pytest.fixture
def folder(tmp_path):
    """A run folder's part that is about the machines."""
    (tmp_path / "federation").mkdir()
    return tmp_path / "federation"


@pytest.fixture
def clock(monkeypatch):
    """Time that passes by sleeping only: `clock[0]` seconds by now. Nobody may wait for more than an hour."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds
        assert now[0] < 3600, "it waits for ever"

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    return now


def follow(out, progress):
    """Follow a coordinator to its outcome, as `flower-local` and the scheduler do."""
    monitor = status_files.CoordinatorMonitor(out / "federation", progress)
    while (outcome := monitor.outcome()) is None:
        monitor.poll()
        if reason := monitor.failure_reason():
            raise SilotuneError(reason)
        time.sleep(0.5)
    status_files.require_finished(outcome)


def heard():
    message = []
    return message, lambda *words: message.append(words)


def test_a_coordinator_that_never_begins_is_not_waited_for_for_ever(folder, clock):
    """Its ServerApp cannot be imported, say, or was refused before it said a word."""
    with pytest.raises(SilotuneError, match=r"^the coordinator has not begun within 600 s "):
        follow(folder.parent, lambda *_: None)
    assert 600 <= clock[0] < 610


def test_one_that_is_gone_without_a_word_is_not_waited_for(folder, clock):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (folder / "coordinator.json").write_text(json.dumps({"pid": int(ended.stdout)}))
    with pytest.raises(SilotuneError, match="process is gone"):
        follow(folder.parent, lambda *_: None)
    assert clock[0] < 10


def test_one_that_works_is_waited_for_and_what_it_does_is_told_once(folder, clock, monkeypatch):
    status_files.write_started(folder)
    message, progress = heard()
    pause = time.sleep
    steps = iter([(1, "alpha", 0, 2)] * 700 + [(1, "beta", 1, 2)] * 700)

    def working(seconds):
        pause(seconds)
        step = next(steps, None)
        if step is None:
            status_files.write_outcome(folder)
        else:
            status_files.write_progress(folder, *step)

    monkeypatch.setattr(time, "sleep", working)
    follow(folder.parent, progress)
    assert message == [(1, "alpha", 0, 2), (1, "beta", 1, 2)]
    assert clock[0] > status_files.STARTUP_TIMEOUT


@pytest.mark.parametrize(
    ("error", "lost", "raised", "message"),
    [
        (InputError("rounds: too many"), False, InputError, "rounds: too many"),
        (SilotuneError("below its quorum"), False, SilotuneError, "below its quorum"),
        (SilotuneError("Flower: ConnectError"), True, SilotuneError, "Flower: ConnectError"),
        (KeyError("accuracy"), False, SilotuneError, "KeyError: 'accuracy'"),
    ],
)
def test_how_it_ended_is_raised(folder, clock, error, lost, raised, message):
    status_files.write_started(folder)
    status_files.write_outcome(folder, error, lost)
    with pytest.raises(SilotuneError) as caught:
        follow(folder.parent, lambda *_: None)
    assert (type(caught.value), str(caught.value)) == (raised, message)
    assert json.loads((folder / "outcome.json").read_text())["state"] == ("lost" if lost else "failed")


def test_what_the_one_before_said_is_forgotten(folder):
    status_files.write_started(folder)
    status_files.write_progress(folder, 1, "", 0, 1)
    status_files.write_outcome(folder)
    status_files.clear(folder)
    assert list(folder.iterdir()) == []
    monitor = status_files.CoordinatorMonitor(folder, lambda *_: None)
    monitor.poll()
    assert (monitor.outcome(), monitor.failure_reason()) == (None, "")
