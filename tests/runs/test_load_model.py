"""`load_model` opens one silo's files alone, whatever the number of silos; its answers are those of `load_run`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import silotune as library
from silotune.errors import InputError
from silotune.runs.load import load_model, load_run
from tests.support.audit_events import audited
from tests.support.small_runs import SINGLE
from tests.support.tiny import tiny_overrides, write_data

FILES, FUNCTIONS = 70, 318
"""Of silotune, passed by opening a model and one prediction. It was 82 and 345 while the configuration was put together
anew from its layers, checks of training ran once more, and a single plan passed the joining of several; then 63 and
304. Seven files have come: LoRA's starts and products apart from LoRA (models/tuners), tasks of numbers
(data/targets), mixes of heads (methods/head_mix), parts before round 1 (training/initial_parts), the folder of caches
and the clock of stages (core)."""


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


@pytest.fixture(scope="module")
def partitioned(runs, tmp_path_factory):
    """Run folders of one data set, partitioned into so many silos."""
    data = write_data(tmp_path_factory.mktemp("data"), ["alpha"], {"train": 100, "validation": 4, "test": 4})

    def made(silos: int, method: str = "fedmcp") -> Path:
        folder = tmp_path_factory.mktemp("runs") / f"{method}-{silos}"
        words = [*tiny_overrides(method, runs.model("bert"), data), "data.tasks=[alpha]", "train.steps=1"]
        words += ["rounds=1", "partition=iid", f"partition.silos={silos}"]
        library.run("demo", *words, out=folder)
        return folder

    return made


def test_a_federation_of_many_silos_opens_as_many_files_as_one_of_one(partitioned):
    folder = partitioned(100)
    many = [name.replace("silo-001", "silo-1") for name in opened_under(folder, "silo-001")]
    assert many == opened_under(partitioned(1), "silo-1")
    assert len(list((folder / "checkpoints" / "silos").iterdir())) > 1
    silos = [name for name in many if name.startswith("checkpoints/silos/")]
    assert silos == ["checkpoints/silos/silo-1/0001.safetensors"]
    assert sorted(many) == sorted({*many}), "each file is opened once"


def test_of_vectors_too_only_the_silos_own_are_opened(runs):
    run = runs.generation("gpt2", "causal", "lora", "method={name: feddpa-t}")
    folder = run.folder
    texts = SINGLE[:2]
    model = load_model(folder, "west")
    assert model.write(texts) == load_run(folder).model("west").write(texts)
    assert model.explain(texts) == load_run(folder).model("west").explain(texts)
    for name in ("instances", "checkpoints/silos"):
        for file in (folder / name).rglob("*east*"):
            file.unlink() if file.is_file() else [inner.unlink() for inner in file.iterdir()]
    assert load_model(folder, "west").explain(texts) == model.explain(texts)
    with pytest.raises(InputError, match="missing or damaged"):
        load_run(folder)


def test_an_unknown_silo_is_refused_before_the_backbone_is_loaded(runs, monkeypatch):
    folder = runs.run("bert", "lora").folder
    monkeypatch.setattr("silotune.runs.load.run_backbone", None)
    with pytest.raises(InputError, match=r"nobody.*alpha, beta"):
        load_model(folder, "nobody")


def test_opening_a_model_and_one_prediction_stay_within_a_count_of_files_and_functions(runs):
    """What a reader has to follow (docs/architecture.md, "A prediction"); whoever makes it longer must say so here."""
    folder = runs.run("bert", "lora").folder
    load_model(folder, "alpha").predict(SINGLE[:1])  # modules are imported, methods registered
    root = Path(library.__file__).parent
    called: set[tuple[str, str]] = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{root}{os.sep}") and "<" not in code.co_name:
            called.add((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        load_model(folder, "alpha").predict(SINGLE[:1])
    finally:
        sys.setprofile(before)
    files = {file for file, _ in called}
    assert f"{root / 'runs' / 'load.py'}" in files
    assert len(files) <= FILES, sorted(files)
    assert len(called) <= FUNCTIONS
