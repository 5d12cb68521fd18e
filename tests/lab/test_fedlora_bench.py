"""The federated-LoRA benchmark at toy size: every method runs, over silos with their ranks and tasks."""

from __future__ import annotations

import pytest

from silotune.config import preset_tree
from silotune.lab.compare import compare
from silotune.lab.comparison import read_comparison
from silotune.runs.run import run
from tests.support.tiny import ROWS, write_data

GLUE = {"MRPC": "beta", "RTE": "beta", "SST-2": "alpha", "QNLI": "beta", "QQP": "beta"}
"""Task of GLUE → the tiny one that stands for it: pairs or single texts, two labels."""
TOY = ("rounds=1", "train.steps=1", "precision=fp32", "threads=1", "train.max_length=32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """GLUE's folders with tiny tasks in them."""
    place = tmp_path_factory.mktemp("glue")
    for seed, (name, tiny) in enumerate(GLUE.items()):
        written = write_data(place / f"seed{seed}", [tiny], {**ROWS, "test": 200}, seed)  # each silo's own kind has 20
        (written / tiny).rename(place / name)
    return place


@pytest.fixture
def words(folder, backbone_folder):
    """What makes a toy of one of the presets."""
    return [*TOY, f"data.path={folder}", f"backbone={backbone_folder('bert')}"]


def only(preset, row, words):
    """The configuration of one row of a comparison."""
    (cell,) = read_comparison(preset, [*words, "seeds=17"], only=[row]).cells
    return cell.config


def test_silos_have_the_ranks_2_to_64(words):
    """That bytes follow them is shown in tests/runs/test_ranks.py."""
    options = only("fedlora-bench-ranks", "hetlora-mixed", words).tuner.options
    assert [options["ranks"].get(f"silo-{number}", options["r"]) for number in range(1, 6)] == [2, 4, 8, 16, 64]


def test_every_silo_has_its_task_and_its_head(words, tmp_path):
    made = run(only("fedlora-bench-tasks", "fedsa-lora", words), out=tmp_path / "run")
    assert {name: task for name, silo in made.federation.silos.items() for task in silo.train} == {n: n for n in GLUE}
    assert {part for part, tensors in made.federation.coordinator.shared.items() if tensors} == {"lora_A"}


@pytest.mark.long
@pytest.mark.parametrize("preset", ["fedlora-bench", "fedlora-bench-tasks", "fedlora-bench-ranks"])
def test_every_method_of_the_benchmark(preset, words, tmp_path):
    section = preset_tree(preset)["compare"]
    compare(preset, *words, seeds=[17], out=tmp_path / "out")
    assert len([*tmp_path.glob("out/*/summary.json")]) == len(section["methods"]) * (
        1 + len(section.get("variants", {}))
    )
    assert (tmp_path / "out" / "table.csv").exists()
