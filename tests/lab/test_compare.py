"""`silotune compare`: its cells, its table by hand, and what is not done twice."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from transformers import BertModel

from silotune.cli.main import main
from silotune.lab.report import html_page
from tests.support.command_line import Silotune, tree, write_federation
from tests.support.tiny import HIDDEN

WORDS = ("compare", "federation.yaml", "methods=local,fedmcp", "seeds=1,2", "rounds=2")
CELLS = ("local-1", "local-2", "fedmcp-1", "fedmcp-2")
COLUMNS = ["method", "silo", "metric", "mean", "std", "n", "trainable_percent", "sent_percent", "bytes_up"]


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "table.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory, backbone_folder) -> Path:
    """A finished comparison in `whole`, beside the files it was made of. It is only read."""
    place = tmp_path_factory.mktemp("compared")
    write_federation(place, backbone_folder("bert"))
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(place)
        patch.setattr(html_page, "save_figure", lambda spec, folder: [])  # which takes seconds
        patch.setattr(sys, "argv", ["silotune", *WORDS, "--out", "whole"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert (ended.value.code or 0, err.getvalue()) == (0, "")
    for word in ("local", "fedmcp", "north", "south", "average", "Bonferroni", "table.csv", "report.html"):
        assert word in out.getvalue()
    return place / "whole"


@pytest.fixture
def compared(comparison: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The finished comparison; the test works in the folder that holds it."""
    monkeypatch.chdir(comparison.parent)
    return comparison


def test_what_it_leaves(compared: Path, silotune: Silotune) -> None:
    files = {path.name for path in compared.iterdir()}
    tables = {"table.csv", "table.md", "table.tex", "baselines.csv", "verdicts.csv", "verdicts.tex"}
    assert files == {*CELLS, *tables, "comparison.json", "report.html", "figures"}
    for cell in CELLS:
        assert (compared / cell / "summary.json").is_file()
    page = (compared / "report.html").read_text(encoding="utf-8")
    assert "Sent: global (" in page
    assert "Kept: private, head_full, head_global" in page
    # a cell is exactly what `run` makes
    assert silotune("run", "federation.yaml", "method=local", "seed=2", "rounds=2", "--out", "alone").code == 0
    alone, cell = (tree(compared.parent / name) for name in ("alone", "whole/local-2"))
    assert alone["config.yaml"] == cell["config.yaml"]
    one, other = (json.loads(found["summary.json"]) for found in (alone, cell))
    assert one["state_sha256"] == other["state_sha256"]


def test_the_table_by_hand(compared: Path, backbone_folder) -> None:
    rows = table(compared)
    assert list(rows[0]) == COLUMNS
    assert [(row["method"], row["silo"]) for row in rows] == [
        (method, silo) for method in ("local", "fedmcp") for silo in ("north", "south", "average")
    ]
    head = HIDDEN * HIDDEN + HIDDEN + HIDDEN * 2 + 2
    bare = BertModel.from_pretrained(backbone_folder("bert"), add_pooling_layer=False).num_parameters() + head
    for row in rows:
        runs = [json.loads((compared / f"{row['method']}-{seed}" / "summary.json").read_text()) for seed in (1, 2)]
        of = row["silo"]
        scores = [run["average"] if of == "average" else run["silos"][of]["test"] for run in runs]
        assert float(row["mean"]) == pytest.approx(np.mean(scores), abs=1e-5)
        assert float(row["std"]) == pytest.approx(np.std(scores, ddof=1), abs=1e-5)
        assert (row["metric"], row["n"]) == ("accuracy", "2")
        assert float(row["bytes_up"]) == np.mean([run["bytes_up"] for run in runs])
        assert float(row["trainable_percent"]) == pytest.approx(100 * runs[0]["trainable_parameters"] / bare, rel=1e-6)
        assert float(row["sent_percent"]) == pytest.approx(100 * runs[0]["sent_parameters"] / bare, rel=1e-6)
    assert {row["bytes_up"] for row in rows if row["method"] == "local"} == {"0"}
    assert min(int(row["bytes_up"]) for row in rows if row["method"] == "fedmcp") > 0


@pytest.mark.usefixtures("no_figures")
def test_what_noise_promises_is_said_of_every_cell(silotune: Silotune, place: Path) -> None:
    noise = ("uplink=clip,laplace", "uplink.epsilon=3")
    outcome = silotune(*WORDS, "methods=fedavg", *noise, "--out", "noised")
    assert outcome.code == 0
    for cell in ("fedavg-1", "fedavg-2"):
        said = [line for line in outcome.out.splitlines() if line.startswith(f"{cell}: ")]
        assert "privacy: laplace noise in every silo" in said[0]
        assert "ε = 3 a round, ε = 6 in total" in said[0]
        assert re.search(r"test \d+\.\d\d \(\d+ s\)", said[-1])  # finished


@pytest.mark.usefixtures("no_figures")
def test_nothing_finished_is_repeated_and_rows_can_be_added(silotune: Silotune, compared: Path, tmp_path: Path) -> None:
    compared = shutil.copytree(compared, tmp_path / "whole")
    before = {cell: times(compared / cell) for cell in CELLS}
    first = (compared / "table.csv").read_bytes()
    assert silotune(*WORDS, "--out", compared, "--resume").code == 0
    assert (compared / "table.csv").read_bytes() == first
    more = ("compare", "federation.yaml", "methods=local,fedmcp,fedavg", "seeds=1,2", "rounds=2", "std.ddof=0")
    assert silotune(*more, "--out", compared, "--resume").code == 0
    assert {cell: times(compared / cell) for cell in CELLS} == before
    rows = table(compared)
    assert [row["method"] for row in rows] == ["local"] * 3 + ["fedmcp"] * 3 + ["fedavg"] * 3
    for row in rows[:6]:  # the divisor is n now
        once = next(r for r in csv.DictReader(first.decode().splitlines()) if r["method"] == row["method"]
                    and r["silo"] == row["silo"])  # fmt: skip
        assert float(row["std"]) == pytest.approx(float(once["std"]) * np.sqrt(1 / 2), abs=1e-5)


def test_a_folder_of_another_configuration_is_left_alone(silotune: Silotune, compared: Path) -> None:
    before = tree(compared / "local-1")
    outcome = silotune(*WORDS, "train.lr=0.5", "--out", compared, "--resume")
    assert outcome.code == 2
    assert "train.lr: 0.001 → 0.5" in outcome.err
    assert tree(compared / "local-1") == before


@pytest.mark.usefixtures("no_figures")
def test_what_the_machine_decides_is_the_same_on_resume(silotune: Silotune, place: Path, backbone_folder) -> None:
    """Threads and precision that are not said are written into a run's folder as they were."""
    write_federation(place, backbone_folder("bert"), threads=None, precision="auto")
    words = ("compare", "federation.yaml", "methods=local", "--out", "out")
    assert silotune(*words).code == 0
    before = tree(place / "out" / "local-1")
    again = silotune(*words, "--resume")
    assert (again.code, again.err) == (0, "")
    assert tree(place / "out" / "local-1") == before


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_cells_that_diverge_are_named_when_the_others_are_finished(
    silotune: Silotune, place: Path, backbone_folder, workers: int
) -> None:
    compare = {"methods": ["local", "fedavg"], "variants": {"wild": {"train.lr": 1e30}}}
    write_federation(place, backbone_folder("bert"), compare=compare)
    outcome = silotune("compare", "federation.yaml", "--out", "out", "--workers", workers)
    assert outcome.code == 1
    (line,) = outcome.err.splitlines()
    assert "2 of 4 cells diverged, the others are finished: " in line
    for cell in ("local-wild-1", "fedavg-wild-1"):
        assert re.search(rf"out/{cell}: silo 'north', round 1, [^;]*the loss is nan \(train.lr is 1e\+30\)", line)
        assert not (place / "out" / cell / "summary.json").exists()
    for cell in ("local-1", "fedavg-1"):
        assert (place / "out" / cell / "summary.json").is_file()


def children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(word) for word in text.split()]


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_workers_make_the_same_table_and_end_with_a_killed_parent(silotune: Silotune, compared: Path) -> None:
    place = compared.parent
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "silotune", *WORDS, "--out", "spread", "--workers", "2"]
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert (place / "spread" / "table.csv").read_bytes() == (compared / "table.csv").read_bytes()

    longer = [word.replace("rounds=2", "rounds=500").replace("spread", "dead") for word in command]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(longer, cwd=place, stdout=quiet, stderr=quiet, env=environment)
    begin = time.monotonic() + 120
    while len(list((place / "dead").glob("*/checkpoints/round-*.json"))) < 2 and time.monotonic() < begin:
        time.sleep(0.05)
    workers = children(process.pid)
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 120
    while any(map(alive, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, workers))
