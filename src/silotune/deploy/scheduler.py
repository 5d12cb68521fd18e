"""`Scheduler` submits queued runs one by one, and again where Flower or the coordinator failed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from silotune.core.locking import is_locked
from silotune.deploy.node_keys import flwr_environment
from silotune.deploy.party_configs import CoordinatorSettings
from silotune.deploy.run_queue import QueuedRun, RunQueue
from silotune.distributed.coordinator import status_files
from silotune.distributed.coordinator.run_registry import FEDERATION_FOLDER
from silotune.distributed.coordinator.status_files import CoordinatorMonitor, read_json, read_progress
from silotune.distributed.flower.commands import run_flwr, submit_job, write_app
from silotune.distributed.processes.restart_policy import RestartPolicy
from silotune.errors import SilotuneError

SUBMISSION_DELAY = 5.0
"""Seconds before the next attempt, if the SuperLink did not take a run or a coordinator ended early."""

LONGEST_STOP = 60.0
"""Seconds that a stopped run's coordinator has to end."""

FAILURES = 5
"""Ends of the coordinator without progress in between, after which a run has failed."""


class Scheduler:
    """Runs one queued run at a time; `up` calls `tick` twice a second.

    A run whose coordinator is gone without an outcome (after a crash, or a restart of the SuperLink or of `up` itself)
    is submitted again, and goes on from its last checkpoint.

    Args:
        settings: the coordinator's.
        say: called with messages for the operator.
        submit: submits a job to the SuperLink and returns Flower's id of the run.
        stop: asks the SuperLink to stop a run by Flower's id.
        clock: the present time in seconds.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        say: Callable[[str], None],
        submit: Callable[[Path], str] | None = None,
        stop: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = RunQueue(Path(settings.folder))
        self._say = say
        self._submit = submit or partial(_submit_job, settings)
        self._stop = stop or partial(_stop_run, settings)
        self._clock = clock
        self._monitor: CoordinatorMonitor | None = None
        self._restarts: RestartPolicy | None = None
        self._not_before = 0.0
        self._said: set[str] = set()

    def tick(self) -> None:
        """Look after the active run, or submit the next one; a run whose file is damaged is named once."""
        for problem in self._queue.damaged():
            if problem not in self._said:
                self._said.add(problem)
                self._say(problem)
        run = self._queue.active()
        if run is None:
            run = self._queue.next()
            if run is not None and self._clock() >= self._not_before:
                self._restarts = None
                self._begin(run)
        elif run.stop:
            self._end_stopped(run)
        elif self._monitor is not None:
            self._follow(run, self._monitor)
        elif not _coordinator_works(run) and self._clock() >= self._not_before:
            self._take_over(run)

    def _watch(self, run: QueuedRun) -> CoordinatorMonitor:
        """Follow a run's status files from now on, and count the ends of its coordinator."""
        folder = Path(run.out) / FEDERATION_FOLDER
        self._monitor = CoordinatorMonitor(folder, lambda *_: None)
        if self._restarts is None:
            self._restarts = RestartPolicy(FAILURES, partial(read_progress, folder))
        return self._monitor

    def _begin(self, run: QueuedRun) -> None:
        """Submit a run; if the SuperLink does not take it, try again later."""
        status_files.clear(Path(run.out) / FEDERATION_FOLDER)
        try:
            flower_id = self._submit(run.job)
        except SilotuneError as error:
            self._not_before = self._clock() + SUBMISSION_DELAY
            self._say(f"run {run.number}: {error}; again in {SUBMISSION_DELAY:g} s")
            return
        if not self._queue.submitted(run.number, flower_id):
            self._end_stopped(replace(run, flower_id=flower_id))
            return
        self._watch(run)
        self._say(f"run {run.number}: {'goes on' if run.submissions else 'starts'} in {run.out}")

    def _take_over(self, run: QueuedRun) -> None:
        """Take over a run that an earlier `up` submitted, whose SuperLink ended with it."""
        if self._watch(run).outcome() is None:
            self._begin(run)

    def _follow(self, run: QueuedRun, monitor: CoordinatorMonitor) -> None:
        """End a run that has an outcome; submit it again if its coordinator is gone without one."""
        outcome = monitor.outcome()
        lost = outcome is not None and outcome["state"] == "lost"
        reason = str(outcome.get("error")) if outcome and lost else monitor.failure_reason()
        if outcome is not None and not lost:
            error = str(outcome.get("error", ""))
            self._over(self._queue.end(run.number, "failed" if error else "finished", error))
        elif reason and self._clock() >= self._not_before:
            assert self._restarts is not None, "it was submitted here"
            self._not_before = self._clock() + SUBMISSION_DELAY
            if self._restarts.may_restart("coordinator"):
                self._say(f"run {run.number}: {reason}")
                self._begin(run)
            else:
                self._over(self._queue.end(run.number, "failed", f"{reason}; {FAILURES} times without progress"))

    def _end_stopped(self, run: QueuedRun) -> None:
        """Stop a run at the SuperLink, end its coordinator, and keep its folder for `resume`."""
        with contextlib.suppress(SilotuneError):
            self._stop(run.flower_id)
        until = self._clock() + LONGEST_STOP
        while _coordinator_works(run) and self._clock() < until:
            started = read_json(Path(run.out) / FEDERATION_FOLDER / "coordinator.json")
            with contextlib.suppress(ProcessLookupError, PermissionError, KeyError, TypeError):
                os.kill(int((started or {})["pid"]), signal.SIGTERM)
            time.sleep(0.5)
        self._over(self._queue.end(run.number, "stopped"))

    def _over(self, run: QueuedRun) -> None:
        self._monitor = self._restarts = None
        self._say(f"run {run.number}: {run.state}{f' ({run.error})' if run.error else ''}")


def _coordinator_works(run: QueuedRun) -> bool:
    """Return whether a coordinator process holds the run's folder."""
    return is_locked(Path(run.out) / FEDERATION_FOLDER)


def _submit_job(settings: CoordinatorSettings, job: Path) -> str:
    """Submit a job to the coordinator's SuperLink; returns Flower's id of the run."""
    return submit_job(write_app(Path(settings.folder) / "app"), job, flwr_environment(settings))


def _stop_run(settings: CoordinatorSettings, flower_id: str) -> None:
    """Ask the SuperLink to stop a run; one that has ended already stays as it is."""
    run_flwr(["flwr", "stop", flower_id, "silotune", "--format", "json"], flwr_environment(settings), "flwr stop")
