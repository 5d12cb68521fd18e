"""`silotune watch`: a run's rounds while it goes on and after it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from silotune.cli.live_view import watch_run
from silotune.core.files import LOCK_FILE, folder_lock
from tests.support.command_line import Silotune
from tests.support.report_runs import write_run

MORE = {"method": {"name": "fedavg"}, "data": {"set": "demo"}, "rounds": 4}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four rounds that stands at the third; `later.json` is its summary."""
    run = write_run(tmp_path / "run-7", "fedavg", 1, {"east": 60.0, "west": 50.0}, more=MORE)
    (run / "summary.json").rename(tmp_path / "later.json")
    return run


def test_once(silotune: Silotune, run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "refused", "round": 4, "silo": "east", "reason": "norm too large"}\n{"event": "si')
    outcome = silotune("watch", run, "--once")
    assert (outcome.code, outcome.err) == (0, "")
    for words in (
        "fedavg: round 1/4: validation 45.00 (east 50.00, west 40.00), 7 s",
        "fedavg: round 3/4: validation 51.67 (east 56.67, west 46.67), 21 s",
        "warning: 1 update was refused; the first in round 4 from east: norm too large",
        "3/4",
    ):
        assert words in outcome.out
    assert "silo west: bytes_down" in silotune("watch", run, "--once", "-v").out
    assert "average" not in outcome.out
    (run.parent / "later.json").rename(run / "summary.json")
    assert "55.0" in silotune("watch", run, "--once").out


def watching(run: Path, patience: float = 10.0) -> threading.Thread:
    options = {"every": 0.05, "patience": patience}
    thread = threading.Thread(target=watch_run, args=(run,), kwargs=options, daemon=True)
    thread.start()
    time.sleep(0.4)
    assert thread.is_alive()
    return thread


def test_it_ends_with_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    thread = watching(run)
    (run.parent / "later.json").rename(run / "summary.json")
    thread.join(10)
    assert not thread.is_alive()
    assert "average" in capsys.readouterr().out


def test_it_ends_where_nobody_works_any_more(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed, or a sweep's trial: no summary will come."""
    kept = run.parent / "kept"
    with folder_lock(run):
        kept.hardlink_to(run / LOCK_FILE)
        thread = watching(run, patience=0.2)
    kept.rename(run / LOCK_FILE)  # one who is killed leaves it there
    thread.join(10)
    assert not thread.is_alive()
    assert "not finished, and nobody works on it" in capsys.readouterr().out.splitlines()[-1]
    with folder_lock(run):
        pass


def test_a_run_that_has_only_begun(silotune: Silotune, run: Path) -> None:
    (run / "events.jsonl").unlink()
    assert "0/4" in silotune("watch", run, "--once").out
