"""`silotune init` writes an example that runs as it is; what it teaches is true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from silotune import read_config
from silotune.data.loading import load_silos
from silotune.data.tasks import Task
from tests.support.command_line import Silotune


@pytest.fixture
def example(silotune: Silotune, place: Path) -> Path:
    outcome = silotune("init", "example")
    assert (outcome.code, outcome.err) == (0, "")
    return place / "example"


def test_it_says_how_to_run_it_in_one_line(silotune: Silotune, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / "[bold]odd[/bold]"
    outcome = silotune("init", folder)
    assert outcome.out.splitlines() == [
        f"wrote {folder}/federation.yaml; run it with: silotune run {folder}/federation.yaml"
    ]


def test_it_runs(silotune: Silotune, example: Path, backbone_folder) -> None:
    words = ("rounds=1", "train.max_length=32", f"backbone={backbone_folder('bert')}", "threads=1", "precision=fp32")
    outcome = silotune("run", "example/federation.yaml", *words, "--out", "out")
    assert (outcome.code, outcome.err) == (0, "")
    summary = json.loads(Path("out/summary.json").read_text(encoding="utf-8"))
    assert set(summary["silos"]) == {"reviews", "support"}
    assert summary["method"] == "fedmcp"
    for silo in summary["silos"].values():
        assert 0 <= silo["test"] <= 100


def test_its_rows_are_the_demo_s_and_its_labels_are_names(example: Path) -> None:
    reviews, support = load_silos(read_config(str(example / "federation.yaml")))
    assert reviews.task.labels == ("negative", "positive")
    assert support.task.labels == ("different", "duplicate")
    assert {len(row.texts) for row in reviews.splits.train} == {1}
    assert {len(row.texts) for row in support.splits.train} == {2}
    for silo, task in ((reviews, "sentiment"), (support, "duplicate_question")):
        (demo,) = load_silos(read_config("demo", [f"data.tasks={task}"]))
        rows = [row for part in vars(silo.splits).values() for row in part]
        demo_rows = [row for part in vars(demo.splits).values() for row in part]
        named = {(row.texts, silo.task.labels[row.label]) for row in rows}
        assert named == {(row.texts, demo.task.labels[row.label]) for row in demo_rows}


def test_the_keys_in_its_comments_are_keys(example: Path) -> None:
    """Every commented-out key can be switched on by removing the `#`."""
    text = (example / "federation.yaml").read_text(encoding="utf-8")
    assert {"dora", "vera"} <= {*text.split("# also ")[1].split("\n")[0].split(", ")}
    keys = ("# task:", "# labels:", "# metric:", "# positive:")
    commented = [line for line in text.splitlines() if line.strip().startswith(keys)]
    assert len(commented) == 4
    for line in commented:
        text = text.replace(line, line.replace("# ", "", 1))
    (example / "federation.yaml").write_text(text, encoding="utf-8")
    support = load_silos(read_config(str(example / "federation.yaml")))[1]
    assert support.task == Task("duplicates", ("different", "duplicate"), "f1", positive="duplicate")
