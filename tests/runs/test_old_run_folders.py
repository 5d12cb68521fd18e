"""Recorded run folders: opened, asked, exported and resumed as by the version that wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from silotune.runs.restore import import_run
from tests.support import old_runs, proof
from tests.support.command_line import Silotune

pytestmark = pytest.mark.parametrize("method", ["fedmcp", "feddpa-t"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded run folders in place, with the models that `silotune import` makes of them."""
    root = old_runs.put_in_place(tmp_path_factory.mktemp("old") / "runs")
    for method in ("fedmcp", "feddpa-t"):
        import_run(root / method / "run")
    return root


@pytest.fixture
def expected(method: str) -> dict:
    """What the recording version made of the finished run."""
    return json.loads((old_runs.RUNS / method / "expected.json").read_text())


def test_the_models_answer_as_they_did(root, method, expected):
    answers = old_runs.predictions(root / method / "run")
    assert list(answers) == list(expected["predictions"])
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
        if "silotune_adapter.safetensors" in digests:  # the name then; the file has the head, too, now
            stored = load_file(target / "model.safetensors")
            adapter = {n.removeprefix("adapter/"): stored[n] for n in stored if n.startswith("adapter/")}
            save_file(adapter, target / "silotune_adapter.safetensors")
            (target / "model.safetensors").unlink()
        assert old_runs.tensors_digest(target) == digests


def test_another_round_ends_in_the_recorded_state(method, expected, tmp_path):
    folder = old_runs.put_in_place(tmp_path / "runs") / method / "run"
    resumed, recorded = old_runs.with_another_round(folder), expected["resumed"]
    same = [key for key in old_runs.SAME if old_runs.on_recorded_machine() or not key.endswith("sha256")]
    # the probe does not see every kernel: "also" has the digests of 06b6d951 on another processor of equal probe
    ends = [recorded["summary"] | also for also in ({}, *recorded.get("also", []))]
    assert {key: resumed.summary[key] for key in same} in [{key: end[key] for key in same} for end in ends]
    proof.assert_recorded(proof.final_state(resumed), recorded["tensors"], relative=1e-5, absolute=1e-5)
