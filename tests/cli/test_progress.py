"""Progress of commands: a line a round off a terminal, none with --quiet, more with --verbose, and a log file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.command_line import Silotune

WORDS = ("run", "federation.yaml", "rounds=2", "train.steps=1", "method=fedmcp", "--out", "out")
LINE = re.compile(
    r"^fedmcp: round (\d)/2: validation \d+\.\d\d \(north \d+\.\d\d, south \d+\.\d\d\), \d+ s", re.MULTILINE
)


def test_a_line_a_round(silotune: Silotune, place: Path) -> None:
    assert LINE.findall(silotune(*WORDS).out) == ["1", "2"]


def test_quiet_prints_the_table_alone_and_files_have_the_lines(silotune: Silotune, place: Path) -> None:
    """The log file, and that of a tracker, by its name."""
    outcome = silotune(*WORDS, "-q", "--log-file", "run.log", "--track", "csv")
    assert outcome.code == 0
    assert "round" not in outcome.out.replace("best round", "")
    assert (place / "out" / "rounds.csv").read_text().startswith("round,seconds,name,value\n1,")
    lines = (place / "run.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 fedmcp: round", line) for line in lines)
    assert LINE.findall("\n".join(line.split(" ", 1)[1] for line in lines)) == ["1", "2"]


def test_verbose_adds_the_silos_losses(silotune: Silotune, place: Path) -> None:
    out = silotune(*WORDS, "--verbose").out
    for number in (1, 2):
        for silo in ("north", "south"):
            assert re.search(rf"^fedmcp: round {number}/2, silo {silo}: .*loss \d", out, re.MULTILINE)


@pytest.mark.usefixtures("no_figures", "place")
def test_a_comparison_says_a_line_a_round_of_each_run_and_counts_its_runs(silotune: Silotune) -> None:
    words = ("compare", "federation.yaml", "methods=local,fedavg", "rounds=2", "train.steps=1", "--out", "out")
    out = silotune(*words, "seeds=2").out
    said = re.findall(r"^(local-2|fedavg-2): round (\d)/2: validation", out, re.MULTILINE)
    assert said == [("local-2", "1"), ("local-2", "2"), ("fedavg-2", "1"), ("fedavg-2", "2")]
    assert re.search(r"^local-2: .*; 1 of 2, about \d+ (s|min \d+ s) left$", out, re.MULTILINE)
    assert re.search(r"^fedavg-2: .*; 2 of 2$", out, re.MULTILINE)
    again = silotune(*words, "seeds=2,3", "--resume").out
    assert "; 2 of 2" in again
    assert "local-2: round" not in again


@pytest.mark.usefixtures("place")
def test_a_sweep_counts_its_trials(silotune: Silotune) -> None:
    out = silotune("sweep", "federation.yaml", "rounds=1", "train.steps=1", "train.lr=1e-3,2e-3", "--out", "out").out
    assert re.findall(r"; (\d of 2)", out) == ["1 of 2", "2 of 2"]
