"""How commands end: SIGTERM and full disks say what to do; `--json` prints the result alone."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Never

import pytest

from silotune.cli import main
from silotune.cli.termination import ended_by_sigterm, until_interrupted
from silotune.core.files import write_text
from silotune.errors import SilotuneError
from tests.support.command_line import Silotune


def test_sigterm_ends_in_order_with_a_line(monkeypatch: pytest.MonkeyPatch, silotune: Silotune) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(main, "_ignore_ctrl_c", lambda: None)

    def terminated() -> int:
        with ended_by_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        return 0

    monkeypatch.setattr(main, "_run_command", terminated)
    outcome = silotune("run")
    assert (outcome.code, outcome.err) == (
        143,
        "silotune: terminated; what is finished is kept (run again with --resume)\n",
    )
    assert signal.getsignal(signal.SIGTERM) is before

    def interrupted() -> Never:
        with ended_by_sigterm():
            raise KeyboardInterrupt

    monkeypatch.setattr(main, "_run_command", interrupted)
    assert silotune("run").code == 130


def test_an_error_after_an_interruption_that_was_dealt_with_is_reported(
    monkeypatch: pytest.MonkeyPatch, silotune: Silotune
) -> None:
    def ending() -> Never:
        with ended_by_sigterm(), until_interrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        raise SilotuneError("a process would not end")

    monkeypatch.setattr(main, "_run_command", ending)
    outcome = silotune("run")
    assert (outcome.code, outcome.err) == (1, "silotune: a process would not end\n")


def test_a_full_disk_names_the_file_and_the_way_on(
    monkeypatch: pytest.MonkeyPatch, silotune: Silotune, tmp_path: Path
) -> None:
    def full(*_: object) -> Never:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write() -> int:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", full)
            write_text(tmp_path / "summary.json", "{}")
        return 0

    monkeypatch.setattr(main, "_run_command", write)
    outcome = silotune("run")
    assert outcome.code == 1
    assert len(outcome.err.splitlines()) == 1
    for words in ("No space left", str(tmp_path / "summary.json"), "free space", "--resume"):
        assert words in outcome.err


@pytest.mark.usefixtures("no_figures")
def test_json_is_all_that_stdout_gets(place: Path, silotune: Silotune) -> None:
    outcome = silotune("run", "federation.yaml", "method=local", "train.steps=1", "--json", "--out", "out")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == {"folder": "out", **json.loads((place / "out" / "summary.json").read_text())}
    assert "round 1/1" in outcome.err
    words = ("compare", "federation.yaml", "methods=local", "train.steps=1", "--out", "compared", "--json", "-q")
    outcome = silotune(*words)
    assert outcome.code == 0
    assert outcome.err.startswith("local-1: ")
    said = json.loads(outcome.out)
    assert [row["silo"] for row in said["table"]] == ["north", "south", "average"]
    assert said["runs"]["local-1"]["silos"]["north"]["test"] == pytest.approx(said["table"][0]["mean"])
    assert "compared/report.html" in said["files"]
