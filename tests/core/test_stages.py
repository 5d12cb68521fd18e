"""Seconds by stage: each moment counts once, to the innermost stage."""

from __future__ import annotations

import time

import pytest

from silotune.core.stages import described, measured, note_command_start, seconds_so_far, stage, waiting_for


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves: `clock(2.0)` passes two seconds."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr("silotune.core.stages._command_started", None)  # of a command that ran nothing

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_a_nested_stage_interrupts_the_outer_one(clock):
    with measured() as stages:
        clock(1)
        with stage("training"):
            clock(2)
            with stage("writing"):
                clock(4)
            clock(8)
        assert stages.seconds() == {"training": 10, "writing": 4, "other": 1, "total": 15}
    assert seconds_so_far() == {}


def test_waiting_counts_and_what_is_done_with_an_item_does_not(clock):
    def items():
        for number in range(2):
            clock(3)
            yield number

    with measured() as stages:
        for _ in waiting_for(items(), "training"):
            clock(10)
        assert stages.seconds() == {"training": 6, "other": 20, "total": 26}


def test_what_passes_before_a_commands_first_run_is_import(clock):
    note_command_start()
    clock(5)
    with measured() as first:
        pass
    with measured() as second:
        pass
    assert first.seconds() == {"import": 5, "other": 0, "total": 5}
    assert second.seconds() == {"other": 0, "total": 0}


def _fail(clock):
    with stage("data"):
        clock(1 / 1)
        clock(1 / 0)


def test_an_error_ends_its_stage(clock):
    with measured() as stages:
        with pytest.raises(ZeroDivisionError):
            _fail(clock)
        clock(2)
        assert stages.seconds() == {"data": 1, "other": 2, "total": 3}


def test_the_line_leaves_out_what_took_no_time():
    assert described({"import": 4.06, "data": 0.01, "other": 0.2, "total": 4.27}) == "4.3 s: import 4.1, other 0.2"
