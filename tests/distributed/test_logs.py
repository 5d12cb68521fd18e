"""Logs of supervised processes stay within their size, and no line is lost or cut."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from silotune.deploy import party_processes as commands
from silotune.distributed.processes import rotating_log, supervisor
from silotune.distributed.processes.rotating_log import RotatingLog
from silotune.distributed.processes.supervisor import Supervisor

NUMBERS = "for n in range(%d, %d): print(f'line {n:06d} ' + 'x' * (n %% 50), flush=n %% 97 == 0)"


def supervised(folder: Path, *programs: str) -> Path:
    """Run programs one after another as the same process of a supervisor; returns its log."""
    with Supervisor(folder, {}) as processes:
        for number, program in enumerate(programs):
            if number:
                processes.children["worker"].command = [sys.executable, "-c", program]
                child = processes.restart("worker")
            else:
                child = processes.start("worker", [sys.executable, "-c", program])
            child.process.wait(timeout=60)
    return folder / "worker.log"


def files(log: Path) -> list[Path]:
    """The log's files, oldest first."""
    older = sorted(log.parent.glob(f"{log.name}.*"), key=lambda path: -int(path.suffix[1:]))
    return [*older, log]


def test_a_process_that_writes_while_its_log_rotates_loses_no_line(tmp_path, monkeypatch):
    monkeypatch.setattr(rotating_log.RotatingLog.__init__, "__defaults__", (5000, 100))
    log = supervised(tmp_path, NUMBERS % (0, 3000), NUMBERS % (3000, 4000))
    written = files(log)
    assert len(written) > 20
    assert all(path.stat().st_size <= 5000 for path in written)
    lines = [line for path in written for line in path.read_text().splitlines()]
    assert [line.split()[1] for line in lines] == [f"{number:06d}" for number in range(4000)]


def test_only_so_many_older_logs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(rotating_log.RotatingLog.__init__, "__defaults__", (2000, 2))
    written = files(supervised(tmp_path, NUMBERS % (0, 1000)))
    assert [path.name for path in written] == ["worker.log.2", "worker.log.1", "worker.log"]
    assert written[-1].read_text().splitlines()[-1].startswith("line 000999")


def test_the_last_words_of_a_process_are_told(tmp_path):
    with Supervisor(tmp_path, {}) as processes:
        child = processes.start("worker", [sys.executable, "-c", "import sys; sys.exit('no rows: ümlaut')"])
        child.process.wait(timeout=60)
        assert child.tail(1) == "no rows: ümlaut"


def test_a_log_that_a_descendant_holds_open_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LAST_OUTPUT", 0.2)
    with Supervisor(tmp_path, {}) as processes:
        child = processes.start("worker", ["sh", "-c", "sleep 60 & echo x"])
        child.process.wait(timeout=60)
        began = time.monotonic()
        assert child.tail(1) == "x"
        assert time.monotonic() - began < 5


def test_a_full_disk_does_not_stop_the_process_and_is_told_later(tmp_path, monkeypatch):
    class FullFile:
        def write(self, _line: bytes) -> int:
            raise OSError(28, "No space left on device")

    log = RotatingLog(tmp_path / "worker.log")
    file, log._file = log._file, FullFile()
    log._write(b"lost\n")
    log._file = file
    log._write(b"kept\n")
    log.close_sink()
    log.wait(10)
    assert (tmp_path / "worker.log").read_text() == "5 bytes of output could not be written\nkept\n"


@pytest.mark.parametrize("content", [b"", b"no end of line", b"y" * 200_000, b"a\n" + b"b" * 70_000 + b"\nc\n"])
def test_output_arrives_byte_by_byte_whatever_its_lines(tmp_path, content):
    log = RotatingLog(tmp_path / "worker.log")
    with os.fdopen(log.sink, "wb") as sink:
        sink.write(content)
    log.wait(10)
    assert (tmp_path / "worker.log").read_bytes() == content


def test_lines_without_a_time_get_one(tmp_path):
    """Flower's lines have none; a worker's have."""
    program = "print('INFO: plain'); print('2026-01-02T03:04:05+00:00 dated'); print('no newline', end='')"
    with Supervisor(tmp_path, {}, timed_logs=True) as processes:
        child = processes.start("superlink", [sys.executable, "-c", program])
        child.process.wait(timeout=60)
        child.tail()
    plain, dated, last = (tmp_path / "superlink.log").read_text().splitlines()
    time_of = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 (.*)")
    assert dated == "2026-01-02T03:04:05+00:00 dated"
    assert [time_of.fullmatch(line)[1] for line in (plain, dated, last)] == ["INFO: plain", "dated", "no newline"]


def test_lines_of_a_process_in_the_foreground_have_times(silotune, tmp_path, monkeypatch):
    file = tmp_path / "coordinator.yaml"
    file.write_text("folder: c\nport: 1\ninsecure: true\n", encoding="utf-8")
    monkeypatch.setattr(commands, "up", lambda settings, say: say("SuperLink on 127.0.0.1"))
    done = silotune("federation", "up", str(file))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\S+\+00:00 SuperLink on 127.0.0.1\n", done.out)
