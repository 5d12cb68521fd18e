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
from tests.support.method_cases import logged
from tests.support.processes import assert_nothing_is_left, bits, finish, finished, processes, wait_until
from tests.support.session_rig import DirectLink, answering, job, local_configs

# -- over sessions -----------------------------------------------------------------------------------------------------


class TwiceLink(DirectLink):
    """Everything that comes, comes twice, and once more with whatever comes next."""

    def pull(self, messages):
        arrivals = list(super().pull(messages))
        again, self.last = getattr(self, "last", []), arrivals
        return [*again, *arrivals, *arrivals]


def test_what_comes_twice_counts_once(whole, tmp_path):
    config, expected = whole("fedmcp")
    configs = local_configs(config, tmp_path / "run")
    coordinate(job(config, tmp_path / "run", configs), TwiceLink(answering(configs)))
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
    config, expected = whole("fedmcp", "federation.deadline=0.2", "federation.retries=3")
    configs = local_configs(config, tmp_path / "run")
    trained.clear()
    coordinate(job(config, tmp_path / "run", configs), SlowLink(answering(configs)))
    assert bits(read_summary(tmp_path / "run")) == bits(expected)
    assert sorted(trained) == sorted([*configs] * 3)
    assert [event["missing"] for event in logged(tmp_path / "run", "quorum")] == [["beta"]]


def test_a_run_whose_flower_is_gone_says_so_and_goes_on(whole, tmp_path):
    """It says `lost`, not `failed`: whoever runs Flower starts it anew."""
    config, expected = whole("fedmcp")
    out = tmp_path / "run"
    configs = local_configs(config, out)
    nodes = answering(configs)

    class Broken(DirectLink):
        def push(self, node, data):
            if len(self.sent) == 9:
                raise ConnectionLost("Flower: ConnectError")
            return super().push(node, data)

    with pytest.raises(ConnectionLost):
        coordinate(job(config, out, configs), Broken(nodes))
    assert json.loads((out / "federation" / "status.json").read_text())["state"] == "lost"
    coordinate(job(config, out, configs), DirectLink(nodes))
    assert bits(read_summary(out)) == bits(expected)


def test_a_round_that_was_judged_before_a_kill_is_logged_once_by_the_engine_that_goes_on(whole, monkeypatch, tmp_path):
    """Killed when round 1 was judged, with round 2's answers, and before round 2's checkpoint."""
    config, expected = whole("fedmcp")
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
    assert [event["round"] for event in logged(out, "round")] == [1]
    summary = run(config, out=out, resume=True).summary
    assert bits(summary) == bits(expected)
    assert [event["round"] for event in logged(out, "round")] == [1, 2, 3]


# -- over processes ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["supernode-beta", "worker-beta", "superlink", "superexec", "fork-server"])
def test_a_run_whose_process_is_killed_says_which_and_goes_on(start, whole, tmp_path, kind):
    """Whatever is killed, all others end; a resumed run ends with the bits of an undisturbed one."""
    config, expected = whole("fedmcp", "rounds=6", "federation.patience=30")
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
    assert bits(finished(*start(config, "--resume"))) == bits(expected)


def parent(process):
    """The parent of a process."""
    return int((Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[1])
