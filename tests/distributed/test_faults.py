"""Faults: over sessions at chosen moments; over real processes, each killed once (long).

Quorum 1 is the default: a round waits for all its silos, so that a disturbed run has the participants of an undisturbed
one, and must end with its bits.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.engine import FlowerEngine
from silotune.distributed.flower.link import ConnectionLost
from silotune.distributed.protocol.frames import decode
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary
from silotune.training.local_trainer import LocalTrainer
from tests.support.method_cases import logged
from tests.support.processes import SAME, assert_nothing_is_left, finish, processes, wait_until
from tests.support.session_rig import DirectLink, answering, job, local_configs


def bits(summary):
    return {key: summary[key] for key in SAME}


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory):
    """`whole(…)` → the configuration and the summary of an undisturbed run in one process."""
    references = {}

    def summary(*words):
        if words not in references:
            config = tiny_config("fedmcp", "train.steps=2", *words)
            references[words] = config, run(config, out=tmp_path_factory.mktemp("whole") / "run").summary
        return references[words]

    return summary


@pytest.fixture
def trained(monkeypatch):
    """The names of silos in the order in which they trained."""
    names, rounds = [], LocalTrainer.rounds
    monkeypatch.setattr(
        LocalTrainer,
        "rounds",
        lambda self, silos, *a: names.extend(silo.name for silo in silos) or rounds(self, silos, *a),
    )
    return names


# -- over sessions -----------------------------------------------------------------------------------------------------


class TwiceLink(DirectLink):
    """Everything that comes, comes twice, and once more with whatever comes next."""

    def pull(self, messages):
        arrivals = list(super().pull(messages))
        again, self.last = getattr(self, "last", []), arrivals
        return [*again, *arrivals, *arrivals]


def test_what_comes_twice_counts_once(whole, tmp_path):
    config, expected = whole("rounds=3")
    configs = local_configs(config, tmp_path / "run")
    link = TwiceLink(answering(configs))
    coordinate(job(config, tmp_path / "run", configs), link)
    assert bits(read_summary(tmp_path / "run")) == bits(expected)


class SlowLink(DirectLink):
    """One silo does its round 2, and its first answer comes after every deadline."""

    def push(self, node, data):
        message = super().push(node, data)
        frame = decode(data)
        held = getattr(self, "held", set())
        if node == 1 and frame.kind == "round" and frame.fields["round"] == 2 and not held:
            self.held = held | {message}
        return message

    def pull(self, messages):
        return super().pull([message for message in messages if message not in getattr(self, "held", ())])


def test_a_silo_that_is_too_slow_is_asked_again_and_does_not_train_again(whole, trained, tmp_path):
    """What it had done by the deadline is in its folder; the same question is answered from there."""
    config, expected = whole("rounds=3", "federation.deadline=0.4", "federation.retries=3")
    configs = local_configs(config, tmp_path / "run")

    trained.clear()
    coordinate(job(config, tmp_path / "run", configs), SlowLink(answering(configs)))
    assert bits(read_summary(tmp_path / "run")) == bits(expected)
    assert sorted(trained) == sorted([*configs] * 3)
    assert [event["missing"] for event in logged(tmp_path / "run", "quorum")] == [["beta"]]


@pytest.mark.parametrize("when", [5, 9, 14])
def test_a_run_whose_flower_is_gone_says_so_and_goes_on(whole, when, tmp_path):
    """It says `lost`, not `failed`: whoever runs Flower starts it anew."""
    config, expected = whole("rounds=3")
    out = tmp_path / "run"
    configs = local_configs(config, out)
    nodes = answering(configs)

    class Broken(DirectLink):
        def push(self, node, data):
            if len(self.sent) == when:
                raise ConnectionLost("Flower: ConnectError")
            return super().push(node, data)

    with pytest.raises(ConnectionLost):
        coordinate(job(config, out, configs), Broken(nodes))
    assert json.loads((out / "federation" / "status.json").read_text())["state"] == "lost"
    coordinate(job(config, out, configs), DirectLink(nodes))
    assert bits(read_summary(out)) == bits(expected)


def test_a_round_that_was_judged_before_a_kill_is_logged_once_by_the_engine_that_goes_on(whole, monkeypatch, tmp_path):
    """Killed when round 1 was judged, with round 2's answers, and before round 2's checkpoint."""
    config, expected = whole("rounds=3")
    out = tmp_path / "run"
    configs = local_configs(config, out)
    nodes = answering(configs)

    class Killed(BaseException):
        pass

    checkpoint = FlowerEngine._checkpoint

    def kill(engine, number, *rest, **more):
        if number == 2:
            raise Killed
        checkpoint(engine, number, *rest, **more)

    monkeypatch.setattr(FlowerEngine, "_checkpoint", kill)
    with pytest.raises(Killed):
        coordinate(job(config, out, configs), DirectLink(nodes))
    assert rounds_of(out) == [1]
    summary = run(config, out=out, resume=True).summary
    assert bits(summary) == bits(expected)
    assert rounds_of(out) == [1, 2, 3]


def rounds_of(out):
    """The rounds that the log says how good they were, in its order."""
    return [event["round"] for event in logged(out, "round")]


# -- over processes ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["supernode-beta", "worker-beta", "superlink", "superexec", "fork-server"])
def test_a_run_whose_process_is_killed_says_which_and_goes_on(start, whole, tmp_path, kind):
    """Whatever is killed, all others end; a resumed run ends with the bits of an undisturbed one."""
    config, expected = whole("rounds=6", "federation.patience=30")
    process, out = start(config)
    wait_until((out / "checkpoints" / "round-0002.json").exists, process)
    targets = processes(out, kind) if kind != "fork-server" else [parent(processes(out, "superlink")[0])]
    for target in targets:
        os.kill(target, signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1, output
    assert f"{kind} ended with code -9" in output or "Flower: " in output
    assert "(run again with --resume)" in output
    assert_nothing_is_left(out)
    process, out = start(config, "--resume")
    output = finish(process)
    assert process.returncode == 0, output
    assert bits(read_summary(out)) == bits(expected)


def parent(process):
    """The parent of a process."""
    return int((Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[1])
