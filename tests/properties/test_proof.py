"""The same numbers as at commit 141778b: states of all methods under all tuners, messages of codecs, tables of reports.

States are compared on every machine, as sums and projections of their tensors; their bits where kernels are the same.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from silotune.communication.uplink import BUILT_IN_CODECS
from tests.support import old_runs, proof


@cache
def recorded_states() -> dict[str, Any]:
    content = json.loads(proof.STATES.read_text())
    names = content["names"]
    return {
        case: (digest, {names[number]: values for number, *values in tensors})
        for case, (digest, tensors) in content["cases"].items()
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return proof.write_inputs(tmp_path_factory.mktemp("proof") / "inputs")


@pytest.mark.parametrize(
    "case",
    [name if name in proof.SHORT else pytest.param(name, marks=pytest.mark.long) for name in recorded_states()],
)
def test_the_final_state_is_the_recorded_one(case, root, tmp_path):
    state, digest = proof.run_case(case, root, tmp_path / "run")
    recorded_digest, numbers = recorded_states()[case]
    proof.assert_recorded(state, numbers)
    if old_runs.on_recorded_machine():
        assert digest == recorded_digest


def test_a_rate_that_differs_by_a_millionth_is_seen(root, tmp_path):
    state, _ = proof.run_case("fedmcp lora", root, tmp_path / "run", "train.lr=0.2000002")
    with pytest.raises(AssertionError):
        proof.assert_recorded(state, recorded_states()["fedmcp lora"][1])


@pytest.mark.parametrize("uplink", proof.UPLINKS)
def test_messages_have_the_recorded_bytes(uplink):
    recorded = json.loads(proof.MESSAGES.read_text())[uplink]
    assert [proof.summary_of(message) for message in proof.messages(uplink)] == recorded


def test_every_codec_has_a_recorded_message():
    assert {uplink.split(",")[0] for uplink in proof.UPLINKS} == {"none", *BUILT_IN_CODECS}


def test_a_reports_tables_are_the_recorded_ones(tmp_path):
    written = proof.tables(tmp_path / "runs")
    assert written.keys() == {path.name for path in proof.TABLES.iterdir() if path.is_file()}
    for name, text in written.items():
        assert text == (proof.TABLES / name).read_text(encoding="utf-8")
