"""`silotune sweep`: what it chooses and by which rows, what it leaves, and what is not done twice."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
from pathlib import Path

import pytest
import yaml

from silotune.errors import InputError
from silotune.lab.comparison import read_comparison
from silotune.lab.sweep import sweep
from tests.support.command_line import Silotune, tree
from tests.support.tiny import tiny_overrides, write_data

LRS = (1e-3, 3e-2)


@pytest.fixture
def words(backbone_folder, tmp_path: Path) -> list[str]:
    """A sweep over the tiny tasks, whose splits lie in files of their own."""
    data = write_data(tmp_path / "data", rows={"train": 32, "validation": 20, "test": 20})
    base = [word for word in tiny_overrides("local", backbone_folder("bert"), data) if not word.startswith("method=")]
    return ["demo", "method=local,fedmcp", *base, "rounds=1", f"train.lr={LRS[0]},{LRS[1]}", "method.mu=0.05,0.2"]


@pytest.fixture
def few(words: list[str]) -> list[str]:
    """The same of one method, over two learning rates."""
    return ["demo", "method=local", *(word for word in words[2:] if not word.startswith("method.mu"))]


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "sweep.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def flipped(words: list[str], folder: Path, split: str) -> list[str]:
    """The same sweep over data in which one split's labels are turned round and its texts exchanged."""
    data = next(Path(word.removeprefix("data.path=")) for word in words if word.startswith("data.path="))
    shutil.copytree(data, folder)
    for path in folder.glob(f"*/{split}.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        labels = 1 + max(row["label"] for row in rows)
        for row in rows:
            row["label"] = labels - 1 - row["label"]
            row["sentence1"] = f"{row['sentence1']} again"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.path={folder}" if word.startswith("data.path=") else word for word in words]


def test_what_it_leaves_and_what_compare_makes_of_it(silotune: Silotune, words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "swept"
    outcome = silotune("sweep", *words, "train.steps=1", "seeds=1,2", "--out", out)
    assert (outcome.code, outcome.err) == (0, "")
    assert "validation score" in outcome.out
    rows = rows_of(out)
    assert list(rows[0]) == ["method", "trial", "train.lr", "method.mu", "validation", "std", "n", "best", "folder"]
    expected = [("local", lr, "") for lr in LRS] + [("fedmcp", lr, mu) for lr in LRS for mu in ("0.05", "0.2")]
    assert [(row["method"], float(row["train.lr"]), row["method.mu"]) for row in rows] == expected
    best = yaml.safe_load((out / "best.yaml").read_text())["per_method"]
    for method in ("local", "fedmcp"):
        own = [row for row in rows if row["method"] == method]
        for row in own:  # from the event logs, which the table does not read
            scores = [max_mean_validation(out / f"{row['folder']}-{seed}") for seed in (1, 2)]
            assert float(row["validation"]) == pytest.approx(statistics.fmean(scores), abs=1e-6)
            assert float(row["std"]) == pytest.approx(statistics.stdev(scores), abs=1e-6)
        (chosen,) = [row for row in own if row["best"]]
        assert float(chosen["validation"]) == max(float(row["validation"]) for row in own)
        assert best[method]["train.lr"] == float(chosen["train.lr"])
    assert {path.name for path in (out / f"{rows[0]['folder']}-1").iterdir()} == {
        "config.yaml", "versions.json", "events.jsonl", "trial.json",
    }  # fmt: skip
    base = [word for word in words[2:] if not word.startswith(("train.lr", "method.mu"))]
    compared = read_comparison("demo", [*base, "methods=local,fedmcp", f"best={out}"])
    assert {cell.entry: cell.config.train.lr for cell in compared.cells} == {m: best[m]["train.lr"] for m in best}
    assert compared.cells[1].config.method.options["mu"] == best["fedmcp"]["method.mu"]


def max_mean_validation(run: Path) -> float:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return max(statistics.fmean(e["validation"].values()) for e in events if e["event"] == "round")


def test_test_rows_take_no_part_in_the_choice(silotune: Silotune, few: list[str], tmp_path: Path) -> None:
    """Other test rows: the same bytes. Other validation rows: other scores, so the comparison can tell."""
    scores = {}
    for split in ("none", "test", "validation"):
        own = flipped(few, tmp_path / split, split)
        assert silotune("sweep", *own, "--out", tmp_path / f"out-{split}").code == 0
        without_folder = [{**row, "folder": ""} for row in rows_of(tmp_path / f"out-{split}")]  # it hashes data.path
        best = yaml.safe_load((tmp_path / f"out-{split}" / "best.yaml").read_text())
        scores[split] = (without_folder, best)
        logged = "".join(path.read_text() for path in (tmp_path / f"out-{split}").glob("*/*.json*"))
        assert '"test' not in logged  # no key begins so; pytest is among the packages of versions.json
    assert scores["test"] == scores["none"]
    assert [row["validation"] for row in scores["validation"][0]] != [row["validation"] for row in scores["none"][0]]


def test_no_test_row_is_in_a_trials_federation(few: list[str], tmp_path: Path, monkeypatch) -> None:
    from silotune.lab import sweep as module

    seen = []
    real = module.build

    def spied(config, backbone, data):
        federation = real(config, backbone, data)
        rows = [evaluation for silo in federation.silos.values() for evaluation in silo.evaluations.values()]
        seen.extend((len(evaluation.validation), len(evaluation.test)) for evaluation in rows)
        return federation

    monkeypatch.setattr(module, "build", spied)
    partitioned = ["data.tasks=[alpha]", "partition=iid", "partition.silos=3"]
    of_fedavg = [word.replace("method=local", "method=fedavg") for word in few]
    for number, more in enumerate(([], partitioned)):
        sweep(*of_fedavg, *more, out=tmp_path / f"out{number}", progress=False)
    assert len(seen) == 2 * 3 + 2 * 3
    assert set(seen) == {(20, 0)}


def test_a_trial_killed_while_its_checkpoints_are_removed_begins_anew(
    silotune: Silotune, few: list[str], tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "out"

    def killed(path: Path, **_: object) -> None:
        next(path.glob("shared-*.safetensors")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("silotune.runs.storage.checkpoints.shutil.rmtree", killed)
        assert silotune("sweep", *few, "--out", out).code != 0
    assert not list(out.rglob("trial.json"))
    assert silotune("sweep", *few, "--out", out, "--resume").code == 0
    whole = tmp_path / "whole"
    assert silotune("sweep", *few, "--out", whole).code == 0
    assert (out / "sweep.csv").read_bytes() == (whole / "sweep.csv").read_bytes()


def test_an_interrupted_or_larger_sweep_repeats_no_trial(silotune: Silotune, few: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert silotune("sweep", *few, "--out", out).code == 0
    whole = tree(out)
    refused = silotune("sweep", *few, "--out", out)
    assert (refused.code, "--resume" in refused.err) == (2, True)
    left = rows_of(out)[1]["folder"]  # as after a kill: one trial has only its log, the two files are not there
    (out / f"{left}-1" / "trial.json").unlink()
    for name in ("sweep.csv", "best.yaml"):
        (out / name).unlink()
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if left not in str(path)}
    assert silotune("sweep", *few, "--out", out, "--resume").code == 0
    assert {path: path.stat().st_mtime_ns for path in times} == times
    after = tree(out)
    assert (after["sweep.csv"], after["best.yaml"]) == (whole["sweep.csv"], whole["best.yaml"])
    more = [word.replace(f"train.lr={LRS[0]}", f"train.lr=2e-3,{LRS[0]}") for word in few]
    assert silotune("sweep", *more, "--out", out, "--resume").code == 0
    assert len(rows_of(out)) == 3
    times = {path: time for path, time in times.items() if path.parent != out}
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_the_samplers_proposals_are_the_same_again(words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    base = [word for word in words[2:] if not word.startswith(("train.lr", "method.mu", "data.tasks"))]
    searched = ["train.lr=1e-4..1e-1:log", "train.epochs=1..2", "train.optimizer=adam,sgd"]
    asked = ["method=local", "data.tasks=[alpha]", *base, *searched]
    proposals = []
    for name in ("one", "other"):
        sweep("demo", *asked, trials=4, out=tmp_path / name, progress=False)
        proposals.append(rows_of(tmp_path / name))
    assert proposals[0] == proposals[1]
    lrs = [float(row["train.lr"]) for row in proposals[0]]
    assert len(set(lrs)) > 1
    assert all(1e-4 <= lr <= 1e-1 and float(f"{lr:.4g}") == lr for lr in lrs)
    assert {row["train.epochs"] for row in proposals[0]} <= {"1", "2"}
    assert {row["train.optimizer"] for row in proposals[0]} <= {"adam", "sgd"}


def test_a_diverging_trial_is_never_best(silotune: Silotune, words: list[str], tmp_path: Path) -> None:
    few = [word for word in words[2:] if not word.startswith(("train.lr", "method.mu"))]
    out = tmp_path / "out"
    wild = ["train.optimizer=sgd", "train.lr=1e38,1e-3"]
    assert silotune("sweep", "demo", "method=local", *few, *wild, "--out", out).code == 0
    first, second = rows_of(out)
    assert (first["validation"], first["best"], second["best"]) == ("", "", "yes")
    outcome = silotune("sweep", "demo", "method=local", *few, wild[0], "train.lr=1e38,2e38", "--out", tmp_path / "all")
    assert outcome.code == 1
    assert "every trial of method 'local' diverged" in outcome.err


def test_validation_rows_are_needed(words: list[str], tmp_path: Path, monkeypatch) -> None:

    from silotune.lab import sweep as module

    real = module.load_silos

    def without(config):
        data = real(config)
        for silo in data:
            silo.splits.validation = []
        return data

    monkeypatch.setattr(module, "load_silos", without)
    with pytest.raises(InputError, match="no silo has validation rows"):
        sweep(*words, out=tmp_path / "out", progress=False)
