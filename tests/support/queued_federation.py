"""A coordinator's queue over silos in this process: coordinators and silos are real, threads play the SuperLink."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from silotune.config import Config
from silotune.deploy.queue import QueuedRun, RunQueue, Scheduler
from silotune.deploy.settings import CoordinatorSettings
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.job import Job
from silotune.distributed.coordinator.plan import run_plan
from silotune.distributed.coordinator.run_registry import RunRegistry
from silotune.distributed.flower.link import ConnectionLost
from silotune.distributed.silo.approvals import Approvals
from silotune.errors import SilotuneError
from tests.support.session_rig import DirectLink, answering, local_configs


class StoppableLink(DirectLink):
    """A link that Flower takes away."""

    stopped = False

    def nodes(self):
        if self.stopped:
            raise ConnectionLost("Flower has stopped the run")
        return super().nodes()


class QueuedFederation:
    """A coordinator with its queue, and the silos of a configuration, whose operators are asked about every run."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.settings = CoordinatorSettings(folder=str(folder / "coordinator"), insecure=True)
        self.queue, self.now = RunQueue(self.settings.folder), 0.0
        self.locals = local_configs(
            config, folder / "silos", policy={"preset": "trusting", "row_order": "seed"}, approval="ask"
        )
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
                job = Job.read(path)
                coordinate(job, link, run_plan if job.cells else None)

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
