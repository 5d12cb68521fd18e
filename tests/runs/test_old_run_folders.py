"""Run folders of silotune 0.1.0: opened, asked, exported and resumed as that version did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import silotune as library
from tests.support import old_runs
from tests.support.command_line import Silotune

pytestmark = pytest.mark.parametrize("method", ["fedmcp", "feddpa-t"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded run folders in place. They are only read."""
    return old_runs.put_in_place(tmp_path_factory.mktemp("old") / "runs")


@pytest.fixture
def expected(method: str) -> dict:
    """What silotune 0.1.0 made of the finished run."""
    return json.loads((old_runs.RUNS / method / "expected.json").read_text())


def test_the_models_answer_as_they_did(root, method, expected):
    run = library.load_run(root / method / "run")
    assert list(run.silos) == list(expected["predictions"])
    answers = old_runs.predictions(run)
    for silo, recorded in expected["predictions"].items():
        for answer, before in zip(answers[silo], recorded, strict=True):
            if isinstance(before, str):
                assert answer == before
            else:
                assert list(answer) == list(before)
                assert answer == pytest.approx(before, abs=1e-5)


def test_exports_hold_the_same_tensors(silotune: Silotune, root, method, expected, tmp_path):
    for name, digests in expected["exports"].items():
        silo, part = name.split()
        target = tmp_path / silo / part
        words = ["export", root / method / "run", "--silo", silo, "--part", part, "--to", target]
        assert silotune(*words).code == 0
        assert old_runs.tensors_digest(target) == digests


def test_resumed_it_ends_in_the_recorded_state(method, tmp_path):
    root = old_runs.put_in_place(tmp_path / "runs")
    recorded = json.loads((root / method / "run" / "summary.json").read_text())
    interrupted = root / method / "interrupted"
    resumed = library.run(str(interrupted / "config.yaml"), out=interrupted, resume=True)
    assert resumed.summary.keys() >= recorded.keys()
    for key in ("method", "rounds", "bytes_up", "bytes_down", "sent_parameters", "trainable_parameters", "tasks"):
        assert resumed.summary[key] == recorded[key]
    for path in (root / method / "run" / "checkpoints").rglob("*0003.safetensors"):
        before, now = load_file(path), load_file(interrupted / path.relative_to(root / method / "run"))
        assert now.keys() == before.keys()
        for name, tensor in before.items():
            torch.testing.assert_close(now[name], tensor, rtol=1e-4, atol=1e-5)
    old_runs.require_recorded_machine()
    for key in ("state_sha256", "shared_sha256", "best_round", "silos", "average"):
        assert resumed.summary[key] == recorded[key]
