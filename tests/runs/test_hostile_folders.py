"""A run folder from elsewhere that is broken, cut off or made to do harm: `load_model` refuses it in one line."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from silotune.errors import InputError
from silotune.runs.personal_model import load_model
from silotune.runs.storage.readers import read_summary

DEEP = "[" * 20_000 + "]" * 20_000
UNKNOWN_DTYPE = json.dumps({"global/w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
ABOUT, SHARED, OWN = (f"models/alpha/{name}" for name in ("model.json", "shared.safetensors", "model.safetensors"))


def edited(name: str, **fields: object) -> Callable[[Path], None]:
    """Replace top-level fields of a JSON file."""

    def edit(run: Path) -> None:
        (path,) = run.glob(name)
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def written(name: str, text: str) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        next(iter(run.glob(name))).write_text(text)

    return write


def linked(name: str, target: str) -> Callable[[Path], None]:
    """Put a link in the place of a file."""

    def link(run: Path) -> None:
        path = next(iter(run.glob(name)))
        path.unlink()
        path.symlink_to(target)

    return link


def unknown_dtype(run: Path) -> None:
    path, content = run / SHARED, struct.pack("<Q", len(UNKNOWN_DTYPE)) + UNKNOWN_DTYPE + b"\0"
    path.unlink()
    path.write_bytes(content)
    edited(ABOUT, files={path.name: hashlib.sha256(content).hexdigest()})(run)


def removed(name: str) -> Callable[[Path], None]:
    return lambda run: shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (shutil.rmtree, "no finished run there"),
        (lambda run: [removed("models")(run), removed("summary.json")(run)], "no finished run there"),
        (lambda run: [removed("models")(run), written("summary.json", DEEP)(run)], "no finished run there"),
        (removed("models"), "has no folder models; `silotune import"),
        (removed(SHARED), "shared.safetensors: missing or damaged ([Errno 2]"),
        (
            lambda run: [removed(SHARED)(run), edited(ABOUT, files=None)(run)],
            "shared.safetensors: missing or damaged (there are no tensors of part 'global')",
        ),
        (written(ABOUT, "[1]"), "model.json: missing or damaged (not a JSON object)"),
        (written(ABOUT, DEEP), "model.json: missing or damaged (nested too deeply)"),
        (written(ABOUT, "{}"), "model.json: missing or damaged ('format')"),
        (linked(ABOUT, "/dev/null"), "unknown silo 'alpha'"),
        (edited(ABOUT, version=7), "missing or damaged (silotune-model 7 instead of silotune-model 1)"),
        (edited(ABOUT, task={"texts": 1}), "missing or damaged (not a task)"),
        (edited(ABOUT, texts=None), "model.json: missing or damaged"),
        (edited(ABOUT, parts=[1]), "model.json: missing or damaged"),
        (edited(ABOUT, mix={"global": "x"}), "model.json: missing or damaged"),
        (edited(ABOUT, weighting={"no": 1}), "model.json: missing or damaged"),
        (edited(ABOUT, tuner={"name": "of-a-plug-in", "options": {}}), "unknown tuner 'of-a-plug-in'"),
        (edited(ABOUT, head={"name": "mlp", "beams": 3}), "model.json: missing or damaged"),
        (edited(ABOUT, backbone_sha256="0" * 64), "another backbone"),
        (linked(SHARED, "/dev/null"), "not a regular file"),
        (linked(SHARED, "../../config.yaml"), "missing or damaged"),
        (unknown_dtype, "missing or damaged (tensors that cannot be read ('F4'))"),
    ],
)
def test_a_folder_from_elsewhere_is_refused_in_a_line(runs, spoil, line, tmp_path) -> None:
    made = runs.run("bert", "lora")
    run = shutil.copytree(made.folder, tmp_path / "run")
    spoil(run)
    with pytest.raises(InputError) as error:
        load_model(run, "alpha", made.federation.backbone)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("silo", ["../alpha", "/etc/passwd", "", "\0"])
def test_a_silos_name_is_no_path(runs, silo) -> None:
    with pytest.raises(InputError, match=r"unknown silo .*; allowed: alpha, beta"):
        load_model(runs.run("bert", "lora").folder, silo)


def test_a_folder_of_several_runs_names_them(tmp_path: Path) -> None:
    for name in ("fedavg-1", "local-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text("{}", encoding="utf-8")
    with pytest.raises(
        InputError, match=r"no finished run there.*; it holds several runs; choose one: fedavg-1, local-1$"
    ):
        read_summary(tmp_path)
    with pytest.raises(InputError, match=r"no finished run there \(no readable summary.json\)$"):
        read_summary(tmp_path / "nowhere")
