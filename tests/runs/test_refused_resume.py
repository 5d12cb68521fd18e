"""`--resume` of what cannot be resumed: code 2 and one line; the run folder stays as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import silotune as library
from tests.support.command_line import DAMAGE, Refused, Silotune, write_federation
from tests.support.tiny import save_backbone

RUN = ("run", "federation.yaml", "--out", "out")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, backbone_folder: Callable[[str], Path]) -> Path:
    """A run folder of two rounds over the federation beside it."""
    folder = tmp_path_factory.mktemp("finished")
    library.run(str(write_federation(folder, backbone_folder("bert"))), "rounds=2", out=folder / "out")
    return folder / "out"


@pytest.fixture
def half(place: Path, finished: Path) -> Path:
    """A run of two rounds in `place`, in the state that a kill in the second round leaves."""
    out = shutil.copytree(finished, place / "out")
    text = (out / "config.yaml").read_text(encoding="utf-8")
    (out / "config.yaml").write_text(text.replace(str(finished.parent), str(place)), encoding="utf-8")
    (out / "summary.json").unlink()
    manifest = json.loads((out / "checkpoints" / "round-0002.json").read_text(encoding="utf-8"))
    assert set(manifest["silos"]) == {"north", "south"}
    return out


def newest(out: Path) -> Path:
    return sorted((out / "checkpoints").glob("round-*.json"))[-1]


@pytest.mark.parametrize(("which", "damage"), [("shared", "cut off"), ("silo", "one bit"), ("shared", "zeroed tail")])
def test_a_damaged_checkpoint(refused: Refused, half: Path, which: str, damage: str) -> None:
    manifest = json.loads(newest(half).read_text(encoding="utf-8"))
    path = half / "checkpoints" / (manifest["shared"] if which == "shared" else manifest["silos"]["south"])
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    refused(*RUN, "rounds=2", "--resume", names=["checkpoint", path.name, "damaged", "sha256"])


def test_a_checkpoint_file_that_is_gone(refused: Refused, half: Path) -> None:
    manifest = json.loads(newest(half).read_text(encoding="utf-8"))
    (half / "checkpoints" / manifest["silos"]["north"]).unlink()
    refused(*RUN, "rounds=2", "--resume", names=["checkpoint", manifest["silos"]["north"], "missing"])


def test_the_tensors_of_another_silo(refused: Refused, half: Path) -> None:
    """South's heads have south's labels: north's file is sound, and wrong."""
    manifest = json.loads(newest(half).read_text(encoding="utf-8"))
    folder = half / "checkpoints"
    shutil.copy(folder / manifest["silos"]["north"], folder / manifest["silos"]["south"])
    refused(*RUN, "rounds=2", "--resume", names=["checkpoint", "south", "damaged"])


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"round": 2}', '{"round": 2, "shared": "x", "silos": {}, "history": {"rows": 1}}']
)
def test_a_damaged_manifest(refused: Refused, half: Path, text: str) -> None:
    newest(half).write_text(text, encoding="utf-8")
    refused(*RUN, "rounds=2", "--resume", names=["checkpoint", newest(half).name, "damaged"])


def test_a_manifest_that_names_a_file_outside(refused: Refused, half: Path, place: Path) -> None:
    manifest = json.loads(newest(half).read_text(encoding="utf-8"))
    shutil.copy(half / "checkpoints" / manifest["shared"], place / "elsewhere.safetensors")
    newest(half).write_text(json.dumps(manifest | {"shared": "../../elsewhere.safetensors"}), encoding="utf-8")
    refused(*RUN, "rounds=2", "--resume", names=["checkpoint", newest(half).name])


def test_another_configuration(refused: Refused, half: Path, backbone_folder: Callable[[str], Path]) -> None:
    refused(*RUN, "rounds=2", "train.lr=0.1", "--resume", names=["--resume", "another configuration", "0.001", "0.1"])
    refused(*RUN, "rounds=1", "--resume", names=["--resume", "has done 2 rounds", "rounds=2 or more"])
    refused(*RUN, "rounds=2", "method=fedavg", "--resume", names=["another configuration", "fedmcp", "fedavg"])
    words = (*RUN, "rounds=2", f"backbone={backbone_folder('roberta')}", "--resume")
    refused(*words, names=["--resume", "another configuration", "backbone"])


def test_a_silos_other_file_is_named_alone(refused: Refused, half: Path, place: Path) -> None:
    shutil.copy(place / "north.csv", place / "other.csv")
    line = refused(*RUN, "rounds=2", "silos.north.path=other.csv", "--resume", names=["silos.north.path", "other.csv"])
    assert "south" not in line


def test_another_description_decides_nothing(silotune: Silotune, half: Path) -> None:
    """The other cases damage or change one thing each; without it the run can be resumed."""
    outcome = silotune(*RUN, "rounds=2", "description=other words", "--resume")
    assert (outcome.code, outcome.err) == (0, "")
    assert (half / "summary.json").is_file()


def test_silos_in_another_order(refused: Refused, half: Path, place: Path) -> None:
    path = place / "federation.yaml"
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(keys | {"silos": keys["silos"][::-1]}), encoding="utf-8")
    refused(*RUN, "rounds=2", "--resume", names=["silos.(order)"])


def test_other_weights_in_the_same_place(refused: Refused, silotune: Silotune, place: Path) -> None:
    save_backbone("bert", place / "backbone", seed=1)
    assert silotune(*RUN, "backbone=backbone").code == 0
    save_backbone("bert", place / "backbone", seed=2)
    refused(*RUN, "backbone=backbone", "--resume", names=["--resume", "another backbone"])


def test_a_file_and_a_folder_that_are_no_run(refused: Refused, place: Path) -> None:
    (place / "out").write_text("mine", encoding="utf-8")
    refused(*RUN, "--resume", names=["--resume", "out", "not a run folder"])
    (place / "out").unlink()
    (place / "out").mkdir()
    (place / "out" / "thesis.txt").write_text("mine", encoding="utf-8")
    refused(*RUN, "--resume", names=["--resume", "out", "not a run folder"])


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_damaged_versions(refused: Refused, half: Path, text: str | None) -> None:
    path = half / "versions.json"
    path.unlink() if text is None else path.write_text(text, encoding="utf-8")
    refused(*RUN, "rounds=2", "--resume", names=["--resume", "out", "not a run folder"])


def test_another_version_of_a_library_is_told_not_refused(half: Path, silotune: Silotune) -> None:
    path = half / "versions.json"
    made = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(made | {"torch": "1.0"}), encoding="utf-8")
    outcome = silotune(*RUN, "rounds=2", "--resume")
    assert outcome.code == 0, outcome.err
    events = [json.loads(line) for line in (half / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event["changed"] for event in events if event["event"] == "versions"] == [[f"torch 1.0 → {made['torch']}"]]
