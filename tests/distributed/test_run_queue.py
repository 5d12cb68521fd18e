"""A coordinator's runs follow one another, go on after crashes, stop and are resumed; coordinators are played here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from silotune.core.files import folder_lock, is_locked
from silotune.deploy import queue as runs
from silotune.deploy import scheduler
from silotune.deploy.queue import RunQueue
from silotune.deploy.scheduler import FAILURES, Scheduler
from silotune.deploy.settings import CoordinatorSettings
from silotune.distributed.coordinator import job
from silotune.distributed.coordinator.run_status import RunStatus
from silotune.distributed.protocol.frames import Frame
from silotune.errors import InputError, SilotuneError


class Party:
    """A coordinator's machine: `up` with a SuperLink that notes what is submitted."""

    def __init__(self, folder: Path) -> None:
        self.settings = CoordinatorSettings(folder=str(folder), insecure=True)
        self.queue = RunQueue(folder)
        self.submitted: list[str] = []
        self.stopped: list[str] = []
        self.said: list[str] = []
        self.now = 0.0
        self.reachable = True
        self.up()

    def up(self) -> None:
        """Start `up`, again if it ran before."""
        self.scheduler = Scheduler(self.settings, self.said.append, self._submit, self.stopped.append, lambda: self.now)

    def _submit(self, job: Path) -> str:
        if not self.reachable:
            raise SilotuneError("the SuperLink did not answer")
        self.submitted.append(job.parent.parent.name)
        return f"flower-{len(self.submitted)}"

    def tick(self, seconds: float = 10.0, times: int = 1) -> None:
        for _ in range(times):
            self.now += seconds
            self.scheduler.tick()

    def add(self, name: str) -> int:
        out = Path(self.settings.folder).parent / name
        (out / "federation").mkdir(parents=True)
        return self.queue.add(out, "fedmcp", 3, ("north", "south")).number

    def states(self) -> list[str]:
        return [run.state for run in self.queue.runs()]

    def status(self, name: str) -> Path:
        return Path(self.settings.folder).parent / name / "federation"

    def ends(self, name: str, error: Exception | None = None, lost: bool = False) -> None:
        """Let a run's coordinator end."""
        RunStatus.begin(self.status(name)).end(error, lost)

    def waits(self, name: str, *silos: str) -> None:
        """Let a run's coordinator be there, and silos answer that their operators have not decided."""
        status = RunStatus.begin(self.status(name))
        status.report(0, "waiting for silos to join", 0, 2)
        for silo in ("north", "south"):
            frame = Frame("waiting", {"silo": silo}) if silo in silos else Frame("hello", {"silo": silo})
            status.received(silo, frame, 10)
        status.write(at_once=True)

    def dies(self, name: str, *progress: Any) -> None:
        """Let a run's coordinator be gone without a word, after it made progress."""
        status = RunStatus.begin(self.status(name))
        if progress:
            status.report(*progress)


@pytest.fixture
def party(tmp_path: Path) -> Party:
    return Party(tmp_path / "coordinator")


def test_runs_follow_one_another_in_the_order_of_their_start(party: Party) -> None:
    for name in ("a", "b", "c"):
        party.add(name)
    party.tick(times=2)
    assert (party.submitted, party.states()) == (["a"], ["running", "queued", "queued"])
    party.ends("a")
    party.tick(times=2)
    assert (party.submitted, party.states()) == (["a", "b"], ["finished", "running", "queued"])
    party.ends("b", SilotuneError("quorum"))
    party.tick(times=2)
    assert (party.submitted, party.states()) == (["a", "b", "c"], ["finished", "failed", "running"])
    assert party.queue.run(2).error == "quorum"


def test_a_run_that_waits_for_approval_makes_room_and_is_asked_about_again_between_the_others(party: Party) -> None:
    for name in ("a", "b", "c"):
        party.add(name)
    party.tick()
    party.waits("a", "north")
    with folder_lock(party.status("a")):  # its coordinator works until Flower has stopped
        party.tick()
    party.ends("a", SilotuneError("Flower has stopped the run"), lost=True)
    party.tick()
    assert (party.stopped, party.states()) == (["flower-1"], ["waiting", "queued", "queued"])
    assert list(party.queue.run(1).waits_for()) == ["north"]
    party.tick()
    party.ends("b")
    party.tick(times=2)
    assert (party.submitted, party.states()) == (["a", "b", "c"], ["waiting", "finished", "running"])
    party.waits("c", "south")
    with folder_lock(party.status("c")):
        party.tick(1.0)
        assert party.stopped == ["flower-1"]  # it holds nobody up who is due
        party.tick(3600.0)
    assert party.stopped == ["flower-1", "flower-3"]
    party.tick(times=2)
    assert (party.submitted[3:], party.states()) == (["a"], ["running", "finished", "waiting"])
    party.ends("a")
    party.tick(times=2)
    assert (party.submitted[4:], party.states()) == (["c"], ["finished", "finished", "running"])
    party.waits("c", "north", "south")
    party.up()
    party.add("d")
    party.tick(times=2)
    assert party.states()[2:] == ["waiting", "running"]
    assert runs.stop(party.settings, 3).state == "stopped"


def test_a_queue_of_three_runs_whose_second_is_stopped(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (runs, scheduler):
        monkeypatch.setattr(
            module, "is_locked", lambda folder: folder == Path(party.settings.folder) or is_locked(folder)
        )
    for name in ("a", "b", "c"):
        party.add(name)
    party.tick()
    party.ends("a")
    party.tick(times=2)
    assert runs.stop(party.settings, 2).stop
    assert party.queue.run(2).listed()["state"] == "stopping"
    with folder_lock(party.status("b")):  # its coordinator works until Flower has stopped
        party.tick(times=2)
        assert party.states()[1] == "running"
    party.tick(times=2)
    assert (party.stopped, party.states()) == (["flower-2"] * 2, ["finished", "stopped", "running"])
    with pytest.raises(InputError, match="run 2: is stopped already"):
        runs.stop(party.settings, 2)


def test_a_queued_run_is_stopped_at_once(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "is_locked", lambda folder: True)
    party.add("a")
    assert runs.stop(party.settings, 1).state == "stopped"
    party.tick()
    assert party.submitted == []


def test_a_run_whose_coordinator_or_superlink_died_goes_on_by_itself(party: Party) -> None:
    party.add("a")
    party.tick()
    party.dies("a")
    party.tick()
    party.ends("a", SilotuneError("Flower: gone"), lost=True)
    party.tick()
    assert (party.submitted, party.states()) == (["a"] * 3, ["running"])
    party.ends("a")
    party.tick()
    assert party.states() == ["finished"]


def test_a_run_goes_on_when_up_is_started_again(party: Party) -> None:
    party.add("a")
    party.tick()
    party.up()
    with folder_lock(party.status("a")):  # the coordinator before is still at work
        party.tick()
        assert party.submitted == ["a"]
    party.tick()
    assert (party.submitted, party.states()) == (["a", "a"], ["running"])


def test_an_outcome_that_came_while_up_was_down_is_taken(party: Party) -> None:
    party.add("a")
    party.tick()
    party.ends("a")
    party.up()
    party.tick(times=2)
    assert (party.submitted, party.states()) == (["a"], ["finished"])


def test_a_coordinator_that_always_dies_fails_its_run(party: Party) -> None:
    party.add("a")
    party.tick()
    for _ in range(FAILURES + 1):
        party.dies("a")
        party.tick()
    assert party.states() == ["failed"]
    assert len(party.submitted) == FAILURES
    assert "5 times without progress" in party.queue.run(1).error


def test_progress_makes_up_for_crashes(party: Party) -> None:
    party.add("a")
    party.tick()
    for number in range(2 * FAILURES):
        party.dies("a", number, "training", 0, 2)
        party.tick()
    assert party.states() == ["running"]


def test_a_superlink_that_does_not_answer_is_asked_again_later(party: Party) -> None:
    party.add("a")
    party.reachable = False
    party.tick()
    party.tick(1.0)
    assert party.said == ["run 1: the SuperLink did not answer; again in 5 s"]
    party.reachable = True
    party.tick()
    assert party.states() == ["running"]


def test_what_can_be_resumed(party: Party, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runs, "is_locked", lambda folder: True)
    prepared = []
    monkeypatch.setattr(job, "prepare", lambda config, out, resume: prepared.append((config.federation, resume)))
    party.add("a")
    (party.status("a") / "config.yaml").write_text(
        yaml.safe_dump({"method": {"name": "fedavg"}, "federation": {"silos": ["north", "south"]}}), encoding="utf-8"
    )
    with pytest.raises(InputError, match="run 1: is queued; only runs that failed or were stopped"):
        runs.resume(party.settings, 1, [])
    party.queue.end(1, "failed", "quorum")
    with pytest.raises(InputError, match=r"rounds=9: a run keeps its configuration; allowed here: federation\.…=value"):
        runs.resume(party.settings, 1, ["rounds=9"])
    with pytest.raises(InputError, match="run 7: not known here; the runs are: 1"):
        runs.resume(party.settings, 7, [])
    resumed = runs.resume(party.settings, 1, ["federation.quorum=0.5", "federation.silos=north"])
    ((federation, resume),) = prepared
    assert (resumed.number, resumed.state, resumed.silos) == (1, "queued", ("north",))
    assert (federation.quorum, federation.silos, resume) == (0.5, ["north"], True)


def test_without_up_nothing_is_queued(party: Party) -> None:
    with pytest.raises(InputError, match="the coordinator does not run; `silotune federation up` starts it"):
        runs.require_up(party.settings)


def test_waiting_for_a_run_ends_with_it(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "is_locked", lambda folder: True)
    monkeypatch.setattr(runs, "CHECK_INTERVAL", 0.0)
    party.add("a")
    party.tick()
    party.ends("a", InputError("no such task"))
    party.tick()
    with pytest.raises(InputError, match="no such task"):
        runs.follow(party.settings, 1, lambda *_: None)
    party.add("b")
    party.queue.end(2, "stopped")
    with pytest.raises(SilotuneError, match="run 2: was stopped; `silotune federation resume`"):
        runs.follow(party.settings, 2, lambda *_: None)


def test_a_run_that_is_stopped_while_it_is_submitted_does_not_run(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SuperLink takes seconds; `stop` finds the run queued and takes it out of the queue."""
    number = party.add("a")
    submit = party._submit

    def slow(job: Path) -> str:
        taken = submit(job)
        party.queue.end(number, "stopped")
        return taken

    monkeypatch.setattr(party, "_submit", slow)
    party.up()
    party.tick()
    assert party.states() == ["stopped"]
    assert party.stopped == ["flower-1"]
    party.tick()
    assert party.submitted == ["a"]


def test_a_run_whose_folder_is_gone_has_failed_and_the_next_begins(party: Party) -> None:
    party.add("a")
    party.add("b")
    shutil.rmtree(party.status("a").parent)
    party.tick(times=2)
    assert (party.submitted, party.states()) == (["b"], ["failed", "running"])
