"""Real processes: SuperLink, SuperNodes and workers on 127.0.0.1, against the same run in one process."""

from __future__ import annotations

import json
import signal

import pytest

from federation.processes import SAME, assert_nothing_is_left, finish, wait_until
from silotune.experiment import run


def assert_same(start, config, tmp_path) -> None:
    expected = run(config, out=tmp_path / "whole").summary
    process, out = start(config)
    said = finish(process)
    assert process.returncode == 0, said
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert {key: summary[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert summary["engine"] == "flower-local"
    assert summary.keys() == expected.keys()
    assert_nothing_is_left(out)


def test_flower_local_ends_with_the_bits_of_one_process(start, tiny_config, tmp_path):
    assert_same(start, tiny_config("fedmcp", "rounds=2", "train.steps=2"), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedavg", "fedmcp", "fedrep", "fedfame", "fedprompt", "feddpa-t"])
def test_flower_local_for_every_method(start, tiny_config, tmp_path, method):
    assert_same(start, tiny_config(method, "rounds=3"), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_run_that_is_ended_and_it_resumes(start, tiny_config, tmp_path, number):
    """Ended in round 2, once by `kill -9`; the resumed run ends with the same bits."""
    config = tiny_config("fedmcp", "rounds=4")
    expected = run(config, out=tmp_path / "whole").summary
    process, out = start(config)
    wait_until((out / "checkpoints" / "round-0001.json").exists, process)
    process.send_signal(number)
    finish(process)
    assert process.returncode in (130, -number)
    assert_nothing_is_left(out)
    process, out = start(config, "--resume")
    said = finish(process)
    assert process.returncode == 0, said
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert {key: summary[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert_nothing_is_left(out)


def test_bad_input_starts_nothing(start, tiny_config, tmp_path):
    process, out = start(tiny_config("centralised"))
    said = finish(process)
    assert process.returncode == 2
    assert "method=centralised" in said
    assert not out.exists()
