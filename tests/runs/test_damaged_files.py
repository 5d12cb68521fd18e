"""A file of tensors that is no longer as it was written is refused wherever it is read; older folders open."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from silotune.core import serialization
from silotune.interop import standalone
from tests.support.command_line import DAMAGE, Silotune


@pytest.fixture
def run(runs, tmp_path: Path) -> Path:
    """A copy of a finished run, whose files have one name each."""
    return shutil.copytree(runs.run("bert", "lora", "method={name: fedmcp}").folder, tmp_path / "run")


def spoil(path: Path, damage: str) -> None:
    content = DAMAGE[damage](path.read_bytes())
    path.unlink()  # other names of the file keep its content
    path.write_bytes(content)


def started(runs, run: Path) -> list[str]:
    """Return the words of a run that starts with the models of a finished one."""
    words = [word for word in runs.words("bert", "lora") if word != "method.adapters=1"]
    return ["run", "demo", *words, "method={name: fedmcp}", f"start={run}"]


def is_refused(silotune: Silotune, *words: object) -> None:
    line = silotune(*words).refusal("model.safetensors", "missing or damaged (its sha256 is not the recorded one)")
    assert "copy it anew, or make it again" in line


@pytest.mark.parametrize("damage", [*DAMAGE, "the other silo's"])
def test_no_command_reads_a_damaged_model(silotune: Silotune, runs, run: Path, tmp_path: Path, damage: str) -> None:
    own = run / "models" / "alpha" / "model.safetensors"
    if damage in DAMAGE:
        spoil(own, damage)
    else:
        os.replace(run / "models" / "beta" / own.name, own)
    is_refused(silotune, "predict", run, "--silo", "alpha", "--text", "a river")
    if damage != "one bit":  # one door for all
        return
    (tmp_path / "new.csv").write_text("sentence1,label\na river,bad\n", encoding="utf-8")
    is_refused(silotune, "evaluate", run, "--silo", "alpha", "--file", tmp_path / "new.csv")
    is_refused(silotune, "export", run, "--silo", "alpha", "--part", "private", "--to", tmp_path / "out")
    is_refused(silotune, "serve", run, "--port", 0)
    is_refused(silotune, *started(runs, run), "--out", tmp_path / "next")


def test_the_next_run_reads_no_damaged_shared_parts(silotune: Silotune, runs, run: Path, tmp_path: Path) -> None:
    spoil(run / "models" / "shared" / "shared.safetensors", "one bit")
    silotune(*started(runs, run), "--out", tmp_path / "next").refusal("shared/shared.safetensors", "sha256")


def test_a_folder_from_before_is_opened_with_one_line(silotune: Silotune, run: Path) -> None:
    path = run / "models" / "alpha" / "model.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content.pop("files").keys() == {"shared.safetensors", "model.safetensors"}
    path.write_text(json.dumps(content), encoding="utf-8")
    serialization._say_once.cache_clear()
    (line,) = silotune("predict", run, "--silo", "alpha", "--text", "a river").err.splitlines()
    assert line == f"note: {path.parent} is from before sha256 were recorded, so damage is not noticed"
    assert not silotune("predict", run, "--silo", "alpha", "--text", "a river").err


@pytest.mark.parametrize("part", ["private", "merged"])
def test_an_export_checks_its_own_files(silotune: Silotune, run: Path, tmp_path: Path, part: str) -> None:
    out = tmp_path / "out"
    assert silotune("export", run, "--silo", "alpha", "--part", part, "--to", out).code == 0
    files = json.loads((out / "export.json").read_text(encoding="utf-8"))["files"]
    assert files.keys() == {path.name for path in out.glob("*.safetensors")}
    standalone.load(out)
    for name in files:
        shutil.copytree(out, tmp_path / name)
        spoil(tmp_path / name / name, "one bit")
        with pytest.raises(OSError, match=rf"{name}: damaged"):
            standalone.load(tmp_path / name)
