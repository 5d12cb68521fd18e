"""`load_model` opens one silo's folder alone, whatever the number of silos, and the folder is whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import silotune as library
from silotune.errors import InputError
from silotune.runs.personal_model import PersonalModel, load_model
from tests.support.audit_events import audited
from tests.support.command_line import Silotune
from tests.support.small_runs import SINGLE
from tests.support.tiny import tiny_overrides, write_data


def opened_under(folder: Path, silo: str) -> list[str]:
    """The files under the folder that `load_model` and one prediction open, in order; no folder may be listed."""
    seen: list[tuple[str, str]] = []

    def note(event, args):
        if event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], str | os.PathLike):
            seen.append((event, os.fspath(args[0])))

    with audited(note):
        load_model(folder, silo).predict(SINGLE[:1])
    inside = [(event, path) for event, path in seen if Path(path).is_relative_to(folder)]
    assert {event for event, _ in inside} == {"open"}
    return [Path(path).relative_to(folder).as_posix() for _, path in inside]


def test_of_many_silos_as_many_files_are_opened_as_of_one_and_shared_parts_are_on_the_disk_once(runs, tmp_path):
    data = write_data(tmp_path / "data", ["alpha"], {"train": 30, "validation": 4, "test": 4})
    words = [*tiny_overrides("fedmcp", runs.model("bert"), data), "data.tasks=[alpha]", "rounds=1", "train.steps=1"]
    for silos in (1, 15):
        library.run("demo", *words, "partition=iid", f"partition.silos={silos}", out=tmp_path / str(silos))
    folder = tmp_path / "15"
    many = [name.replace("silo-01", "silo-1") for name in opened_under(folder, "silo-01")]
    assert many == opened_under(tmp_path / "1", "silo-1")
    assert len(list((folder / "models").iterdir())) == 16
    files = ("model.json", "shared.safetensors", "model.safetensors")
    assert many == [f"models/silo-1/{file}" for file in files], "each is opened once, and nothing else of the run"
    shared = [*folder.glob("models/*/shared.safetensors")]
    assert len(shared) == 16
    assert len({file.stat().st_ino for file in shared}) == 1


@pytest.mark.parametrize("method", ["fedmcp", "feddpa-t", "fedalt", "hetlora"])
def test_a_models_folder_copied_away_needs_nothing_of_the_run(runs, method, tmp_path):
    run = runs.generation("gpt2", "causal", "lora", f"method={{name: {method}}}")
    texts = SINGLE[:2]
    folder = shutil.copytree(run.folder / "models" / "west", tmp_path / "west")
    expected = run.model("west").write(texts)
    assert PersonalModel.open(folder, run.federation.backbone).write(texts) == expected
    if method == "feddpa-t":
        moved = PersonalModel.open(folder, run.federation.backbone)
        assert moved.explain(texts) == run.model("west").explain(texts)
        assert "a vector of each of its 9 training rows" in moved.about["notice"]


def test_a_run_without_models_is_imported(silotune: Silotune, runs, tmp_path):
    made = runs.run("bert", "lora", "method=fedmatch")
    folder = shutil.copytree(made.folder, tmp_path / "run")
    shutil.rmtree(folder / "models")
    asked = ["predict", folder, "--silo", "alpha", "--text", SINGLE[0]]
    outcome = silotune(*asked)
    assert (outcome.code, outcome.err) == (
        2,
        f"silotune: {folder}: has no folder models; `silotune import {folder}` makes it\n",
    )
    assert silotune("import", folder).code == 0
    assert json.loads(silotune(*asked).out)["probabilities"] == made.model("alpha").predict(SINGLE[:1])[0].probabilities


def test_an_unknown_silo_is_refused_before_the_backbone_is_loaded(runs, monkeypatch):
    folder = runs.run("bert", "lora").folder
    monkeypatch.setattr("silotune.runs.personal_model.load_backbone", None)
    with pytest.raises(InputError, match=r"nobody.*alpha, beta"):
        load_model(folder, "nobody")
