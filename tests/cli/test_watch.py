"""`silotune watch`: a run's picture while it goes on and after it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from rich.console import Console

from silotune.cli.live_view import frame, watch_run
from silotune.config import load_resolved
from silotune.core.files import LOCK_FILE, folder_lock
from tests.support.command_line import Silotune
from tests.support.report_runs import write_run

CONFIG = {"method": {"name": "fedavg"}, "data": {"set": "demo"}}


def test_once(silotune: Silotune, tmp_path: Path) -> None:
    more = CONFIG | {"rounds": 4}
    run = write_run(tmp_path / "run-7", "fedavg", 1, {"east": 60.0, "west": 50.0}, more=more)
    (run / "summary.json").rename(tmp_path / "later.json")
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "refused", "round": 4, "silo": "east", "reason": "norm too large"}\n{"event": "si')
    outcome = silotune("watch", run, "--once")
    assert (outcome.code, outcome.err) == (0, "")
    for word in ("run-7: fedavg", "round 3/4", "0:21 gone, 0:07 left", "6.00 MiB", "east", "56.7", "norm too large"):
        assert word in outcome.out
    assert "finished" not in outcome.out
    (tmp_path / "later.json").rename(run / "summary.json")
    assert "finished: average test score 55.00 at round 3" in silotune("watch", run, "--once").out


def test_it_ends_with_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "fedavg", 1, {"east": 60.0}, more=CONFIG | {"rounds": 3})
    summary = run / "summary.json"
    summary.rename(tmp_path / "later.json")
    console = Console(file=(tmp_path / "seen").open("w"), force_terminal=True, width=100)
    watching = threading.Thread(target=watch_run, args=(run, console), kwargs={"every": 0.05}, daemon=True)
    watching.start()
    time.sleep(0.3)
    assert watching.is_alive()
    (tmp_path / "later.json").rename(summary)
    watching.join(10)
    assert not watching.is_alive()
    console.file.flush()
    assert "finished" in (tmp_path / "seen").read_text()


def test_it_ends_where_nobody_works_any_more(tmp_path: Path) -> None:
    """A run that was killed, or a sweep's trial: no summary will come."""
    run = write_run(tmp_path / "run", "fedavg", 1, {"east": 60.0}, more=CONFIG | {"rounds": 4})
    (run / "summary.json").unlink()
    console = Console(file=(tmp_path / "seen").open("w"), force_terminal=True, width=100)
    watching = threading.Thread(
        target=watch_run, args=(run, console), kwargs={"every": 0.05, "patience": 0.2}, daemon=True
    )
    with folder_lock(run):
        (tmp_path / "kept").hardlink_to(run / LOCK_FILE)
        watching.start()
        time.sleep(0.6)
        assert watching.is_alive()
    (tmp_path / "kept").rename(run / LOCK_FILE)  # one who is killed leaves it there
    watching.join(10)
    assert not watching.is_alive()
    console.file.flush()
    shown = (tmp_path / "seen").read_text()
    assert "round 3/4" in shown
    assert "not finished, and nobody works on it" in shown.splitlines()[-1]
    with folder_lock(run):
        pass


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "fedavg", 1, {"east": 60.0}, more=CONFIG | {"rounds": 3})
    (run / "summary.json").unlink()
    (run / "events.jsonl").unlink()
    console = Console(width=100)
    with console.capture() as seen:
        console.print(frame(run, load_resolved(run / "config.yaml")))
    assert "round 0/3" in seen.get()
