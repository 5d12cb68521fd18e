"""Cells of a comparison that differ only in how they predict are trained once, to the bits of training each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas
import pytest

from silotune.lab.comparison import read_comparison
from silotune.lab.shared_training import trained_by_others
from silotune.methods import METHODS
from silotune.runs.run import run
from tests.support.command_line import Silotune, write_federation
from tests.support.method_cases import of_kinds

WORDS = ("federation.yaml", "rounds=2", "tuner=lora", "data.validation_rows=0", "threads=1")
PLAN = ("compare", *WORDS, "methods=feddpa-f,feddpa-t", "seeds=1", "--variant", "fixed: method.weighting=fixed")
OTHERWISE = {"weighting": "fixed", "weight_of": "global", "scale": 0.3, "similarity": "l2", "representation": "mean"}
OTHERWISE |= {"samples": 2, "embed": "local", "clip": False, "alpha": 0.2}
TWINS = {"feddpa-f-fixed-1": "feddpa-f-1", "feddpa-t-fixed-1": "feddpa-t-1"}


def trained(folder: Path) -> list[dict[str, object]]:
    """What training left in the events: its losses, and when each silo's part ended."""
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] in ("silo", "aggregation")]


def result(folder: Path) -> dict[str, object]:
    summary = json.loads((folder / "summary.json").read_text())
    predicted = pandas.read_parquet(folder / "predictions.parquet").to_dict("list")
    return {key: summary[key] for key in ("state_sha256", "silos", "best_round")} | {"predicted": str(predicted)}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone_folder) -> Path:
    write_federation(tmp_path, backbone_folder("bert"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_they_have_the_results_of_runs_of_their_own(place: Path, silotune: Silotune, workers: str) -> None:
    assert silotune(*PLAN, "--workers", workers, "--out", "all").code == 0
    for twin, first in TWINS.items():
        assert trained(place / "all" / twin) == trained(place / "all" / first)  # the times, too: nothing was trained
        method = first.removesuffix("-1")
        assert silotune("run", *WORDS, f"method={method}", "method.weighting=fixed", "--out", twin).code == 0
        assert (place / "all" / twin / "config.yaml").read_text() == (place / twin / "config.yaml").read_text()
        assert result(place / "all" / twin) == result(place / twin)
        assert result(place / twin)["predicted"] != result(place / "all" / first)["predicted"]


@pytest.mark.usefixtures("no_figures")
def test_a_cell_that_began_or_lacks_the_others_checkpoints_trains_itself(place: Path, silotune: Silotune) -> None:
    words = (*PLAN, "--only", "feddpa-t*", "--out", "all")
    assert silotune(*words).code == 0
    before = result(place / "all" / "feddpa-t-fixed-1")
    for name in ("feddpa-t-fixed-1", "feddpa-t-1/checkpoints"):
        shutil.rmtree(place / "all" / name)
    assert silotune(*words, "--resume").code == 0
    assert result(place / "all" / "feddpa-t-fixed-1") == before
    for name in ("feddpa-t-1", "feddpa-t-fixed-1"):
        shutil.rmtree(place / "all" / name)
    own = ("method=feddpa-t", "method.weighting=fixed", "--out", "all/feddpa-t-fixed-1")
    assert silotune("run", *WORDS, *own).code == 0
    (place / "all" / "feddpa-t-fixed-1" / "summary.json").unlink()
    assert silotune(*words, "--resume").code == 0
    assert result(place / "all" / "feddpa-t-fixed-1") == before
    assert trained(place / "all" / "feddpa-t-fixed-1") != trained(place / "all" / "feddpa-t-1")


@pytest.mark.parametrize("words", [("data.validation_rows=4",), ("evaluation.per_round=true",)])
def test_where_rounds_are_scored_each_is_trained(words: tuple[str, ...]) -> None:
    given = ("data.validation_rows=0", "evaluation.test_time=true", "methods=feddpa-t", "seeds=1,2", *words)
    plan = read_comparison("feddpa-dataset1", given, ["fixed: method.weighting=fixed", "two: method.samples=2"])
    assert trained_by_others(plan.cells) == {}
    others = read_comparison("feddpa-dataset1", given[:-1], ["alpha: method.alpha=0.3", "two: method.samples=2"])
    found = {folder: cell.folder for folder, cell in trained_by_others(others.cells).items()}
    assert found == {"feddpa-t-two-1": "feddpa-t-1", "feddpa-t-two-2": "feddpa-t-2"}


@pytest.mark.parametrize("method", of_kinds([name for name in METHODS if METHODS[name].at_prediction], ["feddpa-t"]))
def test_training_does_not_read_what_a_method_names_for_prediction(method: str, tiny_config, tmp_path: Path) -> None:
    def state(name: str, *words: str) -> str:
        few = ("rounds=1", "train.steps=2", "data.validation_rows=4", "data.test_rows=4")
        config = tiny_config(method, "tuner=lora", *few, *words)
        return run(config, out=tmp_path / name, progress=False).summary["state_sha256"]

    expected = state("plain")
    for option in sorted(METHODS[method].at_prediction):
        assert state(option, f"method.{option}={json.dumps(OTHERWISE[option])}") == expected, option
    assert state("trained", "train.lr=0.01") != expected


def test_beams_share_a_training_and_the_longest_answer_does_not() -> None:
    """Prompts are cut so that the longest answer has room, in training too."""
    given = ("data.validation_rows=0", "methods=fedit", "seeds=1")
    plan = read_comparison("feddpa-dataset1", given, ["one: head.beams=1", "short: head.max_new_tokens=5"])
    assert {*trained_by_others(plan.cells)} == {"fedit-one-1"}
