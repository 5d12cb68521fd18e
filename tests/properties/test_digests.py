"""Runs in float32 end in the recorded bits, on machines whose kernels give the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import silotune as library
from tests.support import old_runs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the recorded runs' backbones and data."""
    return old_runs.put_in_place(tmp_path_factory.mktemp("old") / "runs")


@pytest.mark.parametrize("method", old_runs.CASES)
def test_the_final_state_has_the_recorded_bits(root, method, tmp_path):
    old_runs.require_recorded_machine()
    preset, words = old_runs.words(method, root)
    recorded = json.loads(old_runs.DIGESTS.read_text())["state_sha256"]
    assert library.run(preset, *words, out=tmp_path / "run").summary["state_sha256"] == recorded[method]
