"""A run folder from elsewhere that is broken, cut off or made to do harm: `load_model` refuses it in one line."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from silotune.errors import InputError
from silotune.runs.load import load_model, load_run
from silotune.runs.storage.readers import read_summary

DEEP = "[" * 20_000 + "]" * 20_000
UNKNOWN_DTYPE = json.dumps({"shared/global/w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()


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


def renamed_silo(run: Path) -> None:
    tasks = json.loads((run / "summary.json").read_text())["tasks"]
    edited("summary.json", tasks={"../alpha": tasks["alpha"]} | tasks)(run)


def other_method(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"method": "from-a-plug-in"}))


def unknown_dtype(run: Path) -> None:
    path = next(run.glob("checkpoints/shared-*"))
    path.write_bytes(struct.pack("<Q", len(UNKNOWN_DTYPE)) + UNKNOWN_DTYPE + b"\0")


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (shutil.rmtree, "no finished run there"),
        (written("summary.json", "[1]"), "no finished run there"),
        (written("summary.json", DEEP), "no finished run there"),
        (written("summary.json", '{"best'), "no finished run there"),
        (linked("summary.json", "/dev/null"), "no finished run there"),
        (edited("summary.json", best_round=float("inf")), "summary.json: damaged (no best_round)"),
        (edited("summary.json", best_round=7), "round-0007.json: missing or damaged"),
        (edited("summary.json", tasks={"alpha": {"texts": 1}}), "does not say the silos' tasks"),
        (edited("summary.json", attack=[1]), "summary.json: damaged (attack)"),
        (renamed_silo, "summary.json: damaged (silo '../alpha' cannot be a name; allowed: letters"),
        (written("versions.json", DEEP), "versions.json: missing or damaged"),
        (edited("versions.json", backbone="0" * 64), "another backbone"),
        (lambda run: (run / "config.yaml").unlink(), "config.yaml: no such file"),
        (other_method, "unknown method 'from-a-plug-in'"),
        (written("checkpoints/round-*.json", DEEP), "missing or damaged (nested too deeply)"),
        (written("checkpoints/round-*.json", "[]"), "missing or damaged"),
        (edited("checkpoints/round-*.json", round="2"), "damaged (is of round '2')"),
        (
            edited("checkpoints/round-*.json", shared="../../x"),
            "damaged (names a file outside the run folder: ../../x)",
        ),
        (edited("checkpoints/round-*.json", silos={"alpha": "/etc/passwd"}), "outside the run folder: /etc/passwd"),
        (edited("checkpoints/round-*.json", shared="a\0b"), "missing or damaged (embedded null byte)"),
        (edited("checkpoints/round-*.json", shared=7), "missing or damaged"),
        (linked("checkpoints/shared-*", "/dev/null"), "not a regular file"),
        (linked("checkpoints/shared-*", "../config.yaml"), "missing or damaged"),
        (linked("checkpoints/silos/alpha/*", "../../nowhere"), "missing or damaged"),
        (unknown_dtype, "missing or damaged (tensors that cannot be read ('F4'))"),
    ],
)
def test_a_folder_from_elsewhere_is_refused_in_a_line(runs, spoil, line, tmp_path) -> None:
    made = runs.run("bert", "lora")
    run = shutil.copytree(made.folder, tmp_path / "run")
    spoil(run)
    opened = load_run if "attack" in line else lambda *given: load_model(given[0], "alpha", *given[1:])
    with pytest.raises(InputError) as error:
        opened(run, made.federation.backbone)
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
