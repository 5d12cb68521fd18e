"""Wrong commands, run folders, backbones: code 2 and one line; nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import Refused, Silotune

RUN = ("run", "federation.yaml", "--out", "out")
BackboneFolder = Callable[[str], Path]

COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "unknown": (["frobnicate"], ["'frobnicate'", "demo", "init", "methods", "run"]),
    "mistyped": (["rum", "demo"], ["'rum'", "did you mean 'run'"]),
    "run-what": (["run"], ["PRESET_OR_YAML", "silotune run"]),
    "parts-of-what": (["parts"], ["METHOD", "silotune parts"]),
    "init-where": (["init"], ["DIR", "silotune init"]),
    "option": (["run", "federation.yaml", "--resum"], ["'--resum'", "'--resume'"]),
    "option-of-the-root": (["--verison"], ["'--verison'", "'--version'"]),
    "option-without-value": (["run", "federation.yaml", "--out"], ["'--out'", "argument"]),
    "too-many-words": (["methods", "fedmcp"], ["fedmcp", "silotune methods"]),
    "engine": ([*RUN, "--engine", "inproces"], ["engine 'inproces'", "did you mean 'inprocess'"]),
    "parts-of-unknown": (["parts", "fedmpc"], ["'fedmpc'", "did you mean 'fedmcp'"]),
    "parts-word": (["parts", "fedmcp", "tuner.r"], ["'tuner.r'", "key=value"]),
    "parts-value": (["parts", "fedmcp", "tuner.r=0"], ["tuner.r", "greater than or equal to 1"]),
    "config-key": (["config", "lr"], ["did you mean 'train.lr'"]),
    "watch-nothing": (["watch", "nothing"], ["nothing"]),
    "compare-where": (["compare", "federation.yaml", "methods=local"], ["--out"]),
    "compare-over-something": (["compare", "federation.yaml", "methods=local", "--out", "."], ["--out ."]),
    "compare-ablation": (["compare", "federation.yaml", "methods=local", "--out", "new", "--ablation"], ["'local'"]),
    "quiet-and-verbose": ([*RUN, "-q", "-v"], ["--quiet: does not go with --verbose"]),
    "log-file": ([*RUN, "--log-file", "no/such/f.log"], ["--log-file no/such/f.log: cannot be written"]),
    "track": ([*RUN, "--track", "tensorbord"], ["unknown tracker 'tensorbord'"]),
    "folder-below-a-file": (["run", "federation.yaml", "--out", "north.csv/out"], ["--out", "north.csv/out"]),
    "backbone-not-there": ([*RUN, "backbone=./nowhere"], ["backbone", "no folder or file ./nowhere"]),
    "demo-over-something": (["demo", "--out", "."], ["--out", "not empty", "--resume"]),
    "demo-model": (["demo", "--model", "gpt2", "--out", "out"], ["--model: of --task chat"]),
    "demo-task": (["demo", "--task", "caht", "--out", "out"], ["unknown --task 'caht' (did you mean 'chat'?)"]),
    "demo-backbone": (
        ["demo", "--task", "chat", "--model", "nowhere/at-all", "--out", "out"],
        ["cannot load 'nowhere/at-all'"],
    ),
    "example-over-something": (["init", "."], ["not empty"]),
    "example-over-a-file": (["init", "north.csv"], ["north.csv", "is a file, not a folder"]),
    "example-below-a-file": (["init", "north.csv/example"], ["north.csv/example"]),
}


@pytest.mark.parametrize(("words", "names"), COMMANDS.values(), ids=COMMANDS)
def test_a_wrong_command_is_refused(refused: Refused, words: list[str], names: list[str]) -> None:
    refused(*words, names=names)


def test_no_command_prints_the_help_and_one_line(silotune: Silotune) -> None:
    outcome = silotune()
    assert outcome.code == 2
    assert outcome.err.splitlines() == ["silotune: missing command"]
    assert "init" in outcome.out


def test_a_run_folder_that_is_a_file(refused: Refused, place: Path) -> None:
    (place / "out").write_text("mine", encoding="utf-8")
    refused(*RUN, names=["--out out: is a file, not a folder", "another folder"])


class TestBackbone:
    def test_a_folder_without_a_model(self, refused: Refused, place: Path) -> None:
        (place / "empty").mkdir()
        refused(*RUN, "backbone=empty", names=["backbone", "empty"])

    def test_a_model_type_that_no_one_knows(
        self, refused: Refused, place: Path, backbone_folder: BackboneFolder
    ) -> None:
        shutil.copytree(backbone_folder("bert"), place / "odd")
        path = place / "odd" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"model_type": "bart2"}))
        refused(*RUN, "backbone=odd", names=["backbone", "odd", "bart2"])

    @pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
    def test_a_truncated_file(self, refused: Refused, place: Path, backbone_folder: BackboneFolder, file: str) -> None:
        shutil.copytree(backbone_folder("bert"), place / "cut")
        data = (place / "cut" / file).read_bytes()
        (place / "cut" / file).write_bytes(data[: len(data) // 2])
        refused(*RUN, "backbone=cut", names=["backbone", "cut"])

    def test_weights_of_another_shape(self, refused: Refused, place: Path, backbone_folder: BackboneFolder) -> None:
        """Weights that do not fill the configuration's model would leave it partly random."""
        shutil.copytree(backbone_folder("bert"), place / "deeper")
        path = place / "deeper" / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
        refused(*RUN, "backbone=deeper", names=["backbone", "deeper", "layer.2"])
