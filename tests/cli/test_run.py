"""`silotune run`: what it prints and leaves, its `config.yaml` run again, and `Ctrl-C`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
import yaml

from silotune.cli.main import main
from silotune.core import workers
from silotune.runs import run as running
from silotune.training.client import SiloClient
from tests.support.command_line import Silotune
from tests.support.processes import LONGEST

RUN = ("run", "federation.yaml")
LONG_RUN = 5
"""Rounds; the signal comes after two of them."""
MAIN = [sys.executable, "-c", "from silotune.cli.main import main; main()"]


def summary(folder: Path) -> dict[str, object]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_what_a_run_prints_and_leaves(silotune: Silotune, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is resumed from another folder: relative paths of the file mean the same wherever the command is given."""
    outcome = silotune(*RUN, "rounds=2", "--out", "out")
    assert (outcome.code, outcome.err) == (0, "")
    assert "run folder: out" in outcome.out.splitlines()
    for word in ("fedmcp", "north", "south", "average"):
        assert word in outcome.out
    left = {path.name for path in (place / "out").iterdir()}
    files = {"config.yaml", "versions.json", "events.jsonl", "summary.json", "scores.json", "predictions.parquet"}
    assert left == {*files, "checkpoints", "models"}
    kinds = [json.loads(line)["event"] for line in (place / "out" / "events.jsonl").read_text().splitlines()]
    assert kinds == ["silo", "silo", "round"] * 2
    monkeypatch.chdir(place.parent)
    outcome = silotune("run", place / "federation.yaml", "rounds=2", "--out", place / "out", "--resume")
    assert (outcome.code, outcome.err) == (0, "")


def test_a_run_without_a_folder_gets_one_that_says_what_it_is(silotune: Silotune, place: Path) -> None:
    assert silotune(*RUN, "method=local", "seed=4").code == 0
    assert summary(place / "runs" / "federation-local-seed4")["seed"] == 4


def test_the_resolved_configuration_can_itself_be_run(
    silotune: Silotune, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert silotune(*RUN, "train.lr=2e-3", "seed=5", "--out", "first").code == 0
    monkeypatch.chdir(place.parent)
    outcome = silotune("run", place / "first" / "config.yaml", "--out", place / "second")
    assert (outcome.code, outcome.err) == (0, "")
    first, second = summary(place / "first"), summary(place / "second")
    assert first["state_sha256"] == second["state_sha256"]
    texts = [(place / name / "config.yaml").read_text(encoding="utf-8") for name in ("first", "second")]
    assert texts[0] == texts[1]
    assert yaml.safe_load(texts[0])["train"]["lr"] == 0.002


def forked(*words: str) -> None:
    """Run the command in a fork, which has imported all; what it says on standard error is in a file."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
    sys.argv = ["silotune", *words]
    with Path("stderr.txt").open("w", encoding="utf-8", buffering=1) as sys.stderr:
        main()


def test_ctrl_c_ends_with_130_and_resume_finishes(silotune: Silotune, place: Path) -> None:
    process = get_context("fork").Process(target=forked, args=(*RUN, f"rounds={LONG_RUN}", "--out", "out"))
    process.start()
    deadline, wanted = time.monotonic() + LONGEST, place / "out" / "checkpoints" / "round-0002.json"
    while not wanted.exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGINT)
    process.join(LONGEST)
    said = (place / "stderr.txt").read_text()
    assert process.exitcode == 130, said
    assert said.splitlines() == ["silotune: interrupted; what is finished is kept (run again with --resume)"]
    done = [path.stem for path in (place / "out" / "checkpoints").glob("round-*.json")]
    assert 2 <= max(int(name.removeprefix("round-")) for name in done) < LONG_RUN
    assert not (place / "out" / "summary.json").exists()
    assert silotune(*RUN, f"rounds={LONG_RUN}", "--out", "out", "--resume").code == 0
    assert silotune(*RUN, f"rounds={LONG_RUN}", "--out", "whole").code == 0
    resumed, whole = summary(place / "out"), summary(place / "whole")
    for key in ("state_sha256", "shared_sha256", "best_round", "silos", "bytes_up", "bytes_down"):
        assert resumed[key] == whole[key]
    numbers = [event["round"] for event in map(json.loads, (place / "out" / "events.jsonl").open()) if "round" in event]
    assert numbers == sorted(numbers)
    assert len(numbers) == 3 * LONG_RUN


def test_a_ctrl_c_that_a_library_drops_ends_the_run_before_its_next_piece_of_work(
    silotune: Silotune, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = SiloClient.rounds

    def dropping(*words, **more):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return rounds(*words, **more)

    monkeypatch.setattr("silotune.cli.main._ignore_ctrl_c", lambda: None)
    monkeypatch.setattr(SiloClient, "rounds", dropping)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
    try:
        outcome = silotune(*RUN, "rounds=3", "--out", "out")
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.code == 130
    assert not list((place / "out" / "checkpoints").glob("round-1.json"))
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert silotune(*RUN, "rounds=3", "--out", "out", "--resume").code == 0


FROM_MAIN_ON = """
import signal, sys
unblock = signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGINT}
sys.addaudithook(lambda event, args: event == "import" and args[0] == "silotune.cli.app" and unblock[0](*unblock[1:]))
from silotune.cli.main import main
main()
"""
"""SIGINT waits until `main` runs; while Python itself starts, nobody can catch it."""


def block_sigint() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_at_any_moment_ends_with_130(place: Path, workers: str) -> None:
    """From the first import on: never a traceback, never a folder that cannot be resumed."""
    for delay in (0, 0.05, 0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, *((4.0, 5.0, 6.0, 8.0) if workers == "2" else ())):
        process = subprocess.Popen(
            [sys.executable, "-c", FROM_MAIN_ON, *RUN, "rounds=500", "--out", "out", "--resume", "--workers", workers],
            cwd=place,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=block_sigint,
            start_new_session=True,
        )
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate(timeout=60)
        assert (process.returncode, len(err.splitlines())) == (130, 1), err


@pytest.mark.long
def test_a_subprocess_refuses_in_one_line_too(place: Path) -> None:
    """Everything else here runs in this process; the installed command behaves the same, warnings included."""
    ended = subprocess.run([*MAIN, *RUN, "rounds=-1"], cwd=place, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr == "silotune: rounds: must be greater than or equal to 0 (got -1)\n"
    assert ended.stdout == ""


def test_the_number_of_workers_reaches_the_run_and_is_not_for_flower(
    silotune: Silotune, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That they give the same is shown in tests/properties/test_workers.py."""
    asked, run = [], running.run
    monkeypatch.setattr(running, "run", lambda *words, workers, **more: asked.append(workers) or run(*words, **more))
    assert silotune(*RUN, "--workers", "2", "--out", "spread").code == 0
    assert [(workers.number, workers.cluster) for workers in asked] == [(2, None)]
    assert summary(place / "spread")["workers"] == 1
    refused = silotune(*RUN, "--engine", "flower-local", "--workers", "2", "--out", "out")
    assert refused.code == 2
    assert "--workers: of the engines inprocess and ray" in refused.err
    refused = silotune(*RUN, "--address", "auto", "--out", "out")
    assert (refused.code, refused.err) == (2, "silotune: --address: of --engine ray (got --engine inprocess)\n")
    monkeypatch.setattr(workers, "entry_points", lambda **_group: ())  # no package has an engine
    refused = silotune(*RUN, "--engine", "ray", "--out", "out")
    line = "--engine ray: needs the package silotune-ray; pip install silotune-ray"
    assert (refused.code, refused.err) == (2, f"silotune: {line}\n")
    assert not (place / "out").exists()
