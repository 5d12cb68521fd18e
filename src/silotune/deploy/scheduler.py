"""Puts the coordinator's runs into Flower one after another, and again after a crash.

In Flower a run's coordinator asks all silos for their approval before it begins. A run that waits for one makes room
for the others: it leaves Flower (`waiting`), and is asked about again between them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

from silotune.core.clock import utc_now
from silotune.core.files import is_locked
from silotune.deploy.nodes import flwr_environment
from silotune.deploy.queue import QueuedRun, RunQueue
from silotune.deploy.settings import CoordinatorSettings
from silotune.distributed.coordinator.run_status import RunFollower, RunStatus, read_status
from silotune.distributed.flower.commands import run_flwr, submit_job, write_app
from silotune.errors import SilotuneError

SUBMISSION_DELAY = 5.0
"""Seconds before the next attempt, if the SuperLink did not take a run or a coordinator ended early."""

FAILURES = 5
"""Ends of the coordinator without progress in between, after which a run has failed."""

APPROVAL_PAUSE, LONGEST_APPROVAL_PAUSE = 60.0, 600.0
"""Seconds before a run that made room is asked about again: a twentieth of its wait, within these."""

ANSWERS = 30.0
"""Seconds for all silos to answer the first greeting, before a run makes room for which one of them waits."""


class Scheduler:
    """Runs one queued run at a time; `up` calls `tick` twice a second.

    A run whose coordinator is gone before its end (after a crash, or a restart of the SuperLink or of `up` itself) is
    submitted again, and continues from its last checkpoint.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        say: Callable[[str], None],
        submit: Callable[[Path], str] | None = None,
        stop: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = RunQueue(settings.folder)
        self._say = say
        self._submit = submit or partial(_submit_job, settings)
        self._stop = stop or partial(_stop_run, settings)
        self._clock = clock
        self._follower: RunFollower | None = None
        """Follows the active run, if this process submitted it."""
        self._not_before = 0.0
        self._leaving: int | None = None
        """The run that makes room: whatever its coordinator says while it ends, it is asked about again."""
        self._resting: dict[int, float] = {}
        """Run that made room → the time from which on it is asked about again; after a restart of `up` at once."""

    def tick(self) -> None:
        """Look after the active run, or submit the next one."""
        run = next((run for run in self._queue.runs() if run.state == "running"), None)
        resting = [number for number, until in self._resting.items() if self._clock() < until]
        following = self._queue.next(resting) or (self._queue.next([]) if run is None else None)
        if run is not None and run.stop:
            self._end_in_flower(run, "stopped")
        elif run is not None and (run.number == self._leaving or (following is not None and _cannot_begin(run))):
            self._leaving = run.number
            self._end_in_flower(run, "waiting")
        elif run is not None:
            self._look_after(run)
        elif self._clock() >= self._not_before and following is not None:
            self._begin(following)

    @property
    def idle(self) -> bool:
        """Whether no run is active."""
        return all(run.state != "running" for run in self._queue.runs())

    def _begin(self, run: QueuedRun) -> None:
        """Submit a run; if the SuperLink does not take it, try again later."""
        if not run.folder.is_dir():
            self._over(self._queue.end(run.number, "failed", f"{run.folder} is gone"))
            return
        status = RunStatus.begin(run.folder, "submitted")
        try:
            flower_id = self._submit(run.folder / "job.json")
        except SilotuneError as error:
            self._not_before = self._clock() + SUBMISSION_DELAY
            self._say(f"run {run.number}: {error}; again in {SUBMISSION_DELAY:g} s")
            return
        if self._queue.run(run.number).is_over:  # stopped in the meantime
            self._stop(flower_id)
            return
        began = utc_now("milliseconds")
        number = run.submissions + 1
        self._queue.change(run.number, state="running", flower_id=flower_id, submissions=number, began=began, ended="")
        self._follower = RunFollower(run.folder)
        self._say(f"run {run.number}: {'goes on' if run.submissions or status.messages_up else 'starts'} in {run.out}")

    def _look_after(self, run: QueuedRun) -> None:
        """End a run whose coordinator has ended; submit it again if that is gone too early."""
        if self._follower is None and is_locked(run.folder):
            return  # a coordinator that an earlier `up` has submitted is about to end
        status = (self._follower or RunFollower(run.folder)).poll()
        if status.state in ("finished", "failed"):
            self._over(self._queue.end(run.number, "failed" if status.error else "finished", status.error))
        elif self._clock() < self._not_before:
            return
        elif status.state == "lost":
            self._lost(run, status)
        elif self._follower is None:
            self._begin(run)

    def _lost(self, run: QueuedRun, status: RunStatus) -> None:
        """Submit a run again, unless its coordinator was lost too often without progress."""
        self._not_before = self._clock() + SUBMISSION_DELAY
        reached = json.dumps(status.progress)
        failures = run.failures + 1 if reached == run.reached else 1
        run = self._queue.change(run.number, failures=failures, reached=reached)
        if failures >= FAILURES:
            self._over(self._queue.end(run.number, "failed", f"{status.error}; {FAILURES} times without progress"))
        else:
            self._say(f"run {run.number}: {status.error}")
            self._begin(run)

    def _end_in_flower(self, run: QueuedRun, state: Literal["stopped", "waiting"]) -> None:
        """Stop a run at the SuperLink; its folder is kept. Its coordinator ends when Flower has stopped."""
        if not is_locked(run.folder):
            if state == "waiting":
                pause = min(max(APPROVAL_PAUSE, _seconds_since(run.queued) / 20), LONGEST_APPROVAL_PAUSE)
                self._resting[run.number] = self._clock() + pause
            self._over(self._queue.end(run.number, state))
        elif self._clock() >= self._not_before:
            self._not_before = self._clock() + SUBMISSION_DELAY
            try:
                self._stop(run.flower_id)
            except SilotuneError as error:
                self._say(f"run {run.number}: {error}")

    def _over(self, run: QueuedRun) -> None:
        self._follower, self._leaving, self._not_before = None, None, 0.0
        self._say(f"run {run.number}: {run.state}{f' ({run.error})' if run.error else ''}")


def _cannot_begin(run: QueuedRun) -> bool:
    """Return whether a run in Flower waits for an approval, once its silos had time to answer."""
    status = read_status(run.folder)
    if status is None or status.state != "working" or status.round or not any(map(status.waits, run.silos)):
        return False
    times = [status.silos[name].seen or "" if name in status.silos else "" for name in run.silos]
    return min(times) >= status.since or _seconds_since(status.since) >= ANSWERS


def _seconds_since(time: str) -> float:
    """Return how long a time in ISO format is ago."""
    return (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()


def _submit_job(settings: CoordinatorSettings, job: Path) -> str:
    """Submit a job to the coordinator's SuperLink; returns Flower's id of the run."""
    return submit_job(write_app(Path(settings.folder) / "app"), job, flwr_environment(settings))


def _stop_run(settings: CoordinatorSettings, flower_id: str) -> None:
    run_flwr(["flwr", "stop", flower_id, "silotune", "--format", "json"], flwr_environment(settings), "flwr stop")
