"""Runs that wait for an operator hold nobody up: coordinators and silos are real, threads play the SuperLink."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from silotune.config import Config
from silotune.core.locking import folder_lock
from silotune.deploy import queue as runs
from silotune.deploy.printing import print_status
from silotune.deploy.queue import QueuedRun, RunQueue, Scheduler
from silotune.deploy.settings import CoordinatorSettings
from silotune.deploy.status import federation_status
from silotune.distributed.coordinator import dispatcher
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.job import Job
from silotune.distributed.coordinator.run_registry import RunRegistry
from silotune.distributed.flower.link import ConnectionLost
from silotune.distributed.silo.approvals import Approvals
from silotune.errors import SilotuneError
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary
from tests.support.session_rig import DirectLink, answering, local_configs


class StoppableLink(DirectLink):
    """A link that Flower takes away."""

    stopped = False

    def nodes(self):
        if self.stopped:
            raise ConnectionLost("Flower has stopped the run")
        return super().nodes()


class Federation:
    """A coordinator with its queue, and the silos of a configuration, whose operators are asked about every run."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.settings = CoordinatorSettings(folder=str(folder / "coordinator"), insecure=True)
        self.queue, self.now = RunQueue(self.settings.folder), 0.0
        self.locals = local_configs(config, folder / "silos", policy={"row_order": "seed"}, approval="ask")
        self.config = config.model_copy(
            update={"federation": config.federation.model_copy(update={"silos": [*self.locals]})}
        )
        self.answers, self.lock = answering(self.locals), threading.Lock()
        self.flower: dict[str, tuple[StoppableLink, threading.Thread]] = {}
        self.said: list[str] = []
        self.scheduler = Scheduler(self.settings, self.said.append, self._submit, self._stop, lambda: self.now)

    def _submit(self, path: Path) -> str:
        link = StoppableLink({node: self._one_at_a_time(answer) for node, answer in self.answers.items()})

        def work() -> None:
            with suppress(SilotuneError):
                coordinate(Job.read(path), link)

        thread = threading.Thread(target=work)
        self.flower[str(len(self.flower))] = link, thread
        thread.start()
        return str(len(self.flower) - 1)

    def _one_at_a_time(self, answer: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        def locked(data: bytes) -> bytes:
            with self.lock:
                return answer(data)

        return locked

    def _stop(self, flower_id: str) -> None:
        link, thread = self.flower[flower_id]
        link.stopped = True
        thread.join(60)

    def decide(self, state: str, out: Path, *silos: str) -> None:
        """Let the operators of these silos (all by default) decide about a run that asked them."""
        for name in silos or self.locals:
            decisions = Approvals(Path(self.locals[name].folder))
            for waiting in decisions.all():
                if waiting.state == "pending" and waiting.run == RunRegistry.open(out).run:
                    decisions.decide(waiting.name, state)

    def until(self, condition: Callable[[list[QueuedRun]], bool]) -> None:
        """Let `up` work."""
        for _ in range(1000):
            self.now += 0.5
            self.scheduler.tick()
            if condition(self.queue.runs()):
                return
            threading.Event().wait(0.01)
        raise AssertionError((self.queue.runs(), self.said))


@pytest.fixture
def federation(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(dispatcher, "APPROVAL_INTERVAL", 0.2)
    made = Federation(tiny_config("fedmcp", "rounds=1", "train.steps=6", "tuner.r=1"), tmp_path)
    with folder_lock(Path(made.settings.folder)):  # `up` runs
        yield made
        for flower_id in made.flower:
            made._stop(flower_id)


def test_an_approval_after_an_hour_comes_after_two_runs_behind_it(federation, tmp_path, capsys):
    outs = [tmp_path / name for name in ("first", "second", "third")]
    for out in outs:
        runs.start(federation.settings, federation.config, out)

    def others_are_approved(listed: list[QueuedRun]) -> bool:
        federation.decide("approved", outs[0], "beta", "gamma")
        for out in outs[1:]:
            federation.decide("approved", out)
        return [each.state for each in listed[1:]] == ["finished", "finished"]

    federation.until(others_are_approved)
    assert not federation.queue.run(1).is_over
    federation.now += 3600
    federation.until(lambda listed: listed[0].waits_for().keys() == {"alpha"})
    runs.start(federation.settings, federation.config, tmp_path / "rejected")

    def is_rejected(listed: list[QueuedRun]) -> bool:
        federation.decide("rejected", tmp_path / "rejected", "beta")
        return listed[3].state == "failed"

    federation.until(is_rejected)
    print_status(federation_status(federation.settings, lambda _: {}))
    said = capsys.readouterr().out
    assert "run 1 waits for approval: alpha since " in said
    assert "silo 'beta': its operator rejected the run" in said.split("run 4 failed ")[1]
    federation.decide("approved", outs[0])
    federation.until(lambda listed: listed[0].state == "finished")
    whole = run(federation.config, out=tmp_path / "whole").summary["shared_sha256"]
    assert [read_summary(out)["shared_sha256"] for out in outs] == [whole] * 3
    assert federation.said.count("run 1: waiting") < 6  # it is asked about ever less often
