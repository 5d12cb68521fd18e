"""`silotune transfer`: what it leaves, and what it refuses in one line."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

import silotune
from silotune import InputError
from tests.support.command_line import tree
from tests.support.tiny import UNPARTITIONED, save_backbone


@pytest.fixture
def pair(made) -> tuple[Path, Path]:
    return made("fedavg", "alpha"), made("fedavg", "beta")


def test_table_figure_and_what_is_printed(silotune, made, pair, tmp_path):
    out = tmp_path / "new" / "transfer"
    before = [tree(run) for run in pair]
    outcome = silotune("transfer", *pair, made("fedavg", "gamma"), "--out", out)
    assert (outcome.code, outcome.err) == (0, "")
    assert sorted(path.name for path in out.iterdir()) == ["transfer.csv", "transfer.png", "transfer.tex"]
    assert (out / "transfer.png").read_bytes().startswith(b"\x89PNG")
    assert "source $\\downarrow$" in (out / "transfer.tex").read_text(encoding="utf-8")
    rows = list(csv.DictReader((out / "transfer.csv").open(encoding="utf-8")))
    assert {(row["source"], row["target"]) for row in rows} == {
        (source, target) for source in ("alpha", "beta", "gamma") for target in ("alpha", "beta", "gamma")
    }
    scores = {(row["source"], row["target"]): float(row["absolute"]) for row in rows}
    for row in rows:
        own = scores[row["target"], row["target"]]
        assert float(row["relative"]) == pytest.approx(100 * float(row["absolute"]) / own, abs=1e-4)
        assert (row["method"], row["tuner"], row["setting"], row["seed"]) == ("fedavg", "lora", "fedavg, lora", "1")
        assert (row["metric"], row["source_type"]) == ("accuracy", "other")
        assert {row["source_lr"], row["target_lr"]} == {"0.03"}
        assert {row["source_alpha"], row["target_alpha"]} == {""}
        assert float(row["majority"]) == pytest.approx(
            35 if row["target"] == "gamma" else 50
        )  # 7 of 20, labels go round
    for task, run in zip(("alpha", "beta"), pair, strict=True):
        average = json.loads((run / "summary.json").read_text())["average"]
        assert scores[task, task] == pytest.approx(average, abs=1e-6)
        assert f"{average:.1f} (100)" in outcome.out
    assert [tree(run) for run in pair] == before
    assert "the runs differ" not in outcome.out


def test_settings_that_a_matrix_mixes_are_said_and_listed(silotune, made, tmp_path):
    runs = (
        made("fedavg", "alpha", "partition=dirichlet", "partition.alpha=2.0"),
        made("fedavg", "beta", "train.lr=0.01"),
    )
    outcome = silotune("transfer", *runs, "--out", tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    line = "the runs differ in train.lr (alpha 0.03, beta 0.01) and partition.alpha (alpha 2, beta none)"
    assert f"fedavg, lora: {line}" in outcome.out.splitlines()
    of = {"alpha": ("0.03", "2"), "beta": ("0.01", "")}
    rows = list(csv.DictReader((tmp_path / "out" / "transfer.csv").open(encoding="utf-8")))
    assert len(rows) == 4
    for row in rows:
        for end in ("source", "target"):
            assert (row[f"{end}_lr"], row[f"{end}_alpha"]) == of[row[end]]


def test_the_sources_head_leaves_out_other_label_counts(silotune, made, pair, tmp_path):
    words = ("transfer.head=source", "transfer.types={alpha: short, beta: pairs}", "--out", tmp_path / "out")
    outcome = silotune("transfer", *pair, made("fedavg", "gamma"), *words)
    assert (outcome.code, outcome.err) == (0, "")
    rows = list(csv.DictReader((tmp_path / "out" / "transfer.csv").open(encoding="utf-8")))
    pairs = {(row["source"], row["target"]) for row in rows}
    assert pairs == {("alpha", "alpha"), ("alpha", "beta"), ("beta", "alpha"), ("beta", "beta"), ("gamma", "gamma")}
    assert {row["target"]: row["target_type"] for row in rows} == {"alpha": "short", "beta": "pairs", "gamma": "other"}


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(silotune, tmp_path, *words) -> str:
    out = tmp_path / "refused"
    outcome = silotune("transfer", *words, "--out", out)
    assert (outcome.code, outcome.out) == (2, "")
    assert not out.exists()
    (line,) = outcome.err.splitlines()
    return line


def test_an_unfinished_run(silotune, pair, tmp_path):
    half = shutil.copytree(pair[1], tmp_path / "half")
    (half / "summary.json").unlink()
    assert f"{half}: no finished run there" in refused(silotune, tmp_path, pair[0], half)
    assert "nowhere: no finished run there" in refused(silotune, tmp_path, pair[0], tmp_path / "nowhere")


def test_another_backbone(silotune, made, pair, tmp_path):
    other = save_backbone("bert", tmp_path / "other", seed=8)
    run = made("fedavg", "beta", f"backbone={other}")
    line = refused(silotune, tmp_path, pair[0], run)
    assert f"{run}: backbone is {other}" in line
    assert str(pair[0]) in line


OTHERS = {
    "silos predict with their own": (("fedavg", "beta", "head.scope=private"), r"3 silos predicts with its own head"),
    "private adapters": (("fedmcp", "beta", "head.scope=private"), "with its own private and head_full"),
    "another rank": (("fedavg", "beta", "tuner.r=4"), "tuner.r is 4, in "),
    "other parts": (("fedavg", "beta", "method.adapters=1"), "mix is global, in "),
    "the same task": (("fedavg", "alpha"), "fedavg, lora, lr 0.03 has alpha with seed 1, 1; it needs one"),
    "another method": (
        ("fedfame", "beta"),
        "fedavg, lora has alpha with seed 1; it needs one run for each task and seed, of 2 tasks",
    ),
    "another seed": (("fedavg", "beta", "seed=2"), "has alpha with seed 1; beta with seed 2; it needs"),
    "several tasks in one run": (
        ("local", "alpha", "data.tasks=[alpha,beta]", *UNPARTITIONED, "head.scope=private"),
        "holds 2 tasks (alpha, beta)",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_cannot_be_compared(silotune, made, pair, tmp_path, case):
    run, message = OTHERS[case]
    assert message in refused(silotune, tmp_path, pair[0], made(*run, "rounds=1", "train.steps=1"))


def test_changed_data(silotune, made, data_folder, pair, tmp_path):
    data = shutil.copytree(data_folder, tmp_path / "data")
    run = made("fedavg", "beta", f"data.path={data}")
    rows = (data / "beta" / "test.jsonl").read_text().splitlines()
    (data / "beta" / "test.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    line = refused(silotune, tmp_path, pair[0], run)
    assert "its data has changed (silo 'silo-1': 19 test rows now, 20 when it ran)" in line
    shutil.rmtree(data)
    assert f"{run}: data.path" in refused(silotune, tmp_path, pair[0], run)


def test_words(silotune, pair, tmp_path):
    assert "at least 2 finished runs" in refused(silotune, tmp_path, pair[0])
    twice = (pair[0], f"{pair[0]}/.", pair[1])
    assert "alpha with seed 1, 1; beta with seed 1" in refused(silotune, tmp_path, *twice)
    assert "transfer.head: must be target or source" in refused(silotune, tmp_path, *pair, "transfer.head=sauce")
    assert "did you mean 'transfer.head'" in refused(silotune, tmp_path, *pair, "transfer.hed=source")
    assert "transfer.types" in refused(silotune, tmp_path, *pair, "transfer.types=3")


def test_no_two_tasks_with_as_many_labels(silotune, made, pair, tmp_path):
    words = (pair[0], made("fedavg", "gamma"), "transfer.head=source")
    assert "no two tasks that one head reads" in refused(silotune, tmp_path, *words)


def test_a_folder_that_holds_something(silotune, pair, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for words in (("--out", tmp_path), ()):
        outcome = silotune("transfer", *pair, *words)
        assert (outcome.code, outcome.out, len(outcome.err.splitlines())) == (2, "", 1)
        assert "--out" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_from_python(made, pair, tmp_path):
    moved = silotune.transfer([pair[0], silotune.load_run(pair[1])], tmp_path / "out", types={"alpha": "own"})
    frame = moved.to_pandas()
    assert len(frame) == 4
    assert set(frame["source_type"]) == {"own", "other"}
    (matrix,) = moved.matrices
    for text in (repr(moved), moved._repr_html_()):
        assert matrix.label in text
    assert f"{matrix.absolute.at['alpha', 'beta']:.1f}" in moved._repr_html_()
    with pytest.raises(InputError, match="at least 2"):
        silotune.transfer([pair[0]], tmp_path / "other")
