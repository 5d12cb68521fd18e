"""Real processes: SuperLink, SuperNodes and workers on 127.0.0.1, against the same run in one process."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from silotune.config import dump
from silotune.core.files import folder_lock
from silotune.distributed.flower.commands import supernode_command
from silotune.distributed.local.run_local import run_local
from silotune.errors import InputError
from silotune.runs.build.resolve import resolve
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary
from silotune.runs.storage.run_folder import RunFolder
from tests.support.command_line import Silotune
from tests.support.method_cases import snapshot
from tests.support.processes import assert_nothing_is_left, bits, finish, finished, wait_until
from tests.support.session_rig import federate
from tests.support.tiny import ONE_TASK

LONG = ("fedfame", "fdlora", "fedalt", "fedprompt")
"""Labeled rows at the coordinator, a last phase, tensors of its own for every silo, a head without tensors."""


@pytest.mark.parametrize("method", ["fedmcp", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_flower_local_ends_with_the_bits_of_one_process(silotune: Silotune, whole, tmp_path, monkeypatch, method):
    """`test_sessions.py` has all methods, without processes."""
    tasks = [] if method in ONE_TASK else ["data.tasks=[alpha,beta]"]
    config, expected = whole(method, *tasks, "rounds=2")
    file, out = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(dump(config), encoding="utf-8")
    monkeypatch.setenv("TEST_RUN", str(out))  # of all processes that it starts
    done = silotune("run", file, "--out", out, "--engine", "flower-local")
    assert done.code == 0, done.err
    summary = read_summary(out)
    assert bits(summary) == bits(expected)
    assert (summary["baselines"], summary["engine"]) == (expected["baselines"], "flower-local")
    assert summary.keys() == expected.keys()
    assert_nothing_is_left(out)


@pytest.mark.long
def test_sums_under_masks_have_the_bits_of_one_process(start, whole):
    """`test_masked_runs.py` has crashes and dropouts, without processes. Scores stay at the silos."""
    config, expected = whole("fedit", "aggregation.secure=true", "rounds=2")
    summary = finished(*start(config))
    for key in ("shared_sha256", "state_sha256", "best_round", "bytes_up"):
        assert summary[key] == expected[key]
    assert {each["validation"] for each in summary["silos"].values()} == {None}


def test_what_cannot_be_resumed_stays_as_it_is(tiny_config, tmp_path):
    """A folder of something else, of another configuration, of another engine; one in which another run is at work."""
    config = resolve(tiny_config("fedmcp", "rounds=1", "train.steps=1")).config
    other, whole = tmp_path / "other", tmp_path / "whole"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    run(config, out=whole)
    changed = config.model_copy(update={"seed": 9})
    for out, wanted, message in (
        (other, config, "not a run folder"),
        (whole, changed, "another configuration"),
        (whole, config, "not made by this engine; resume it with --engine inprocess"),
    ):
        before = snapshot(out)
        with pytest.raises(InputError, match=message):
            run_local(wanted, out, resume=True)
        assert snapshot(out) == before
    with folder_lock(tmp_path / "busy"), pytest.raises(InputError, match="another process is at work there"):
        run_local(config, tmp_path / "busy", resume=True)
    assert list((tmp_path / "busy").iterdir()) == []


def test_what_the_command_checks_is_what_its_coordinator_writes(tiny_config, tmp_path):
    """Else no run could be resumed."""
    config = resolve(tiny_config("fedmcp", "rounds=1", "train.steps=1")).config
    federate(config, tmp_path / "run")
    RunFolder.check(tmp_path / "run", dump(config), resume=True)


@pytest.mark.parametrize("name", ["b c", "a.b-c", "x_1", "1", "true", "a  b", "0x1F", "a" * 80])
def test_a_node_gets_its_silos_name(name):
    words = supernode_command("127.0.0.1:1", 2, name, Path("/tmp/a b/w.sock"))
    settings = parse_config_args([words[words.index("--node-config") + 1]])
    assert settings == {"silo": name, "worker": "/tmp/a b/w.sock"}


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_outlives_a_run_that_is_ended_and_it_resumes(start, tiny_config, in_one_process, number, code):
    """Ended in round 2, once by `kill -9`; the resumed run ends with the same bits."""
    config, expected = tiny_config("fedmcp", "rounds=4"), in_one_process("fedmcp", "rounds=4").summary
    process, out = start(config)
    wait_until((out / "checkpoints" / "round-0001.json").exists, process)
    process.send_signal(number)
    finish(process)
    assert process.returncode == code
    assert_nothing_is_left(out)
    assert bits(finished(*start(config, "--resume"))) == bits(expected)
    assert_nothing_is_left(out)


def test_bad_input_starts_nothing(silotune: Silotune, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    (tmp_path / "run.yaml").write_text(dump(tiny_config("centralised")), encoding="utf-8")
    outcome = silotune("run", tmp_path / "run.yaml", "--out", tmp_path / "run", "--engine", "flower-local")
    assert outcome.code == 2
    assert "method=centralised" in outcome.err
    assert not (tmp_path / "run").exists()
