"""Keeps the coordinator's queue of runs, which its operator starts, resumes, stops and follows.

Flower starts whatever it is given at once, so the queue is ours; a run is in Flower while its state is `running`.
`scheduler.py` puts one after another there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from silotune.core.clock import utc_now
from silotune.core.files import is_locked
from silotune.deploy.nodes import record_decision, transaction
from silotune.deploy.settings import CoordinatorSettings
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER, RunFollower, read_status
from silotune.distributed.flower.commands import require_flower
from silotune.errors import InputError, SilotuneError

if TYPE_CHECKING:
    from silotune.config import Config
    from silotune.runs.engines.base import Progress

CHECK_INTERVAL = 0.5
"""Seconds between looks at the queue."""

RunState = Literal["queued", "running", "waiting", "finished", "failed", "stopped"]

STATES: tuple[RunState, ...] = get_args(RunState)


@dataclass(frozen=True)
class QueuedRun:
    """A run that was started at this coordinator.

    Args:
        number: counts the coordinator's runs from 1.
        method: the method's id; of a plan, those of its runs.
        state: `queued` until the SuperLink has it; `waiting` while it has left it, since silos have not approved it;
            `finished`, `failed` and `stopped` are final until it is resumed.
        flower_id: Flower's id of the last submission.
        submissions: how often it was submitted to the SuperLink.
        failures: how often its coordinator was lost since it last made progress.
        reached: the progress that it had last made, as JSON.
    """

    number: int
    out: str
    method: str
    rounds: int
    silos: tuple[str, ...]
    state: RunState
    flower_id: str
    submissions: int
    failures: int
    reached: str
    stop: bool
    queued: str
    began: str
    ended: str
    error: str

    @property
    def folder(self) -> Path:
        """The coordinator's part of the run folder."""
        return Path(self.out) / FEDERATION_FOLDER

    @property
    def is_over(self) -> bool:
        """Whether the run's state is final."""
        return self.state in ("finished", "failed", "stopped")

    def finished_rounds(self) -> int:
        """Return the number of the last round that has a checkpoint; of a plan, the sum over its runs."""
        last: dict[Path, int] = {}
        for path in (path for depth in ("", "*/") for path in Path(self.out).glob(f"{depth}checkpoints/round-*.json")):
            number = path.stem.removeprefix("round-")
            if number.isdigit():
                last[path.parent] = max(last.get(path.parent, 0), int(number))
        return sum(last.values())

    def activity(self) -> str:
        """Describe the coordinator's present work, such as silos it waits for; empty if it is idle."""
        status = read_status(self.folder) if self.state in ("running", "waiting") else None
        return "" if status is None or status.progress is None else str(status.progress[1])

    def waits_for(self) -> dict[str, str]:
        """Return the silos whose operators have not approved the run, and since when (UTC)."""
        status = None if self.is_over else read_status(self.folder)
        entries = {} if status is None else status.silos
        return {name: entry.waits_since for name, entry in entries.items() if entry.waits_since and name in self.silos}

    def listed(self) -> dict[str, Any]:
        """Return the run as plain values, for `federation runs`."""
        return {
            "run": self.number,
            "state": "stopping" if self.stop else self.state,
            "method": self.method,
            "round": self.finished_rounds(),
            "rounds": self.rounds,
            "silos": list(self.silos),
            "activity": self.activity(),
            "queued": self.queued,
            "began": self.began,
            "ended": self.ended,
            "error": self.error,
            "out": self.out,
        }


class RunQueue:
    """The runs of one coordinator. Several processes may read and change them."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def runs(self) -> list[QueuedRun]:
        """Return all runs, oldest first."""
        with transaction(self._folder) as database:
            return [_run(row) for row in database.execute("select * from runs order by number")]

    def run(self, number: int) -> QueuedRun:
        """Return a run."""
        runs = {run.number: run for run in self.runs()}
        if number not in runs:
            raise InputError(f"run {number}: not known here; the runs are: {', '.join(map(str, runs)) or 'none'}")
        return runs[number]

    def add(self, out: Path, method: str, rounds: int, silos: Sequence[str]) -> QueuedRun:
        """Append a run; one in the same folder is queued again, under its number."""
        with transaction(self._folder) as database:
            entry = database.execute("select * from runs where out = ?", (str(out),)).fetchone()
            if entry is not None and not _run(entry).is_over:
                raise InputError(f"run {entry['number']}: is {entry['state']} in {out}")
            row = database.execute(
                "insert or replace into runs (number, out, method, rounds, silos, state, queued) "
                "values (?, ?, ?, ?, ?, 'queued', ?) returning *",
                (entry and entry["number"], str(out), method, rounds, json.dumps(silos), utc_now("milliseconds")),
            ).fetchone()
        return _run(row)

    def change(self, number: int, **fields: Any) -> QueuedRun:
        """Set fields of a run."""
        names = ", ".join(f"{name} = ?" for name in fields)
        with transaction(self._folder) as database:
            words = f"update runs set {names} where number = ? returning *"
            return _run(database.execute(words, (*fields.values(), number)).fetchone())

    def end(self, number: int, state: RunState, error: str = "") -> QueuedRun:
        """Set a run's final state."""
        return self.change(number, state=state, error=error, stop=False, ended=utc_now("milliseconds"))

    def next(self, resting: Collection[int]) -> QueuedRun | None:
        """Return the run that has waited longest since it was queued or left Flower, except resting runs."""
        due = [run for run in self.runs() if run.state in ("queued", "waiting") and run.number not in resting]
        return min(due, key=lambda run: (run.ended if run.state == "waiting" else run.queued, run.number), default=None)


def _run(row: Any) -> QueuedRun:
    return QueuedRun(**{**row, "silos": tuple(json.loads(row["silos"])), "stop": bool(row["stop"])})


def start(settings: CoordinatorSettings, config: Config, out: Path, resume: bool = False) -> QueuedRun:
    """Queue a run; the coordinator's `up` submits it when the runs before it are over."""
    from silotune.distributed.coordinator.job import prepare

    require_flower()
    require_up(settings)
    prepare(config, out, resume)
    return _queued(settings, [config], out)


def start_plan(settings: CoordinatorSettings, cells: Mapping[str, Config], out: Path) -> QueuedRun | None:
    """Queue several runs as one; return that run, or the one under way in the folder, or None if all are finished."""
    from silotune.distributed.coordinator.job import prepare_plan

    require_flower()
    under_way = [run for run in RunQueue(settings.folder).runs() if run.out == str(out) and not run.is_over]
    if under_way:
        return under_way[0]
    finished = all((out / name / "summary.json").exists() for name in cells)
    if not finished:
        require_up(settings)
    prepare_plan(cells, out)
    return None if finished else _queued(settings, [*cells.values()], out)


def _queued(settings: CoordinatorSettings, configs: Sequence[Config], out: Path) -> QueuedRun:
    methods = ", ".join(dict.fromkeys(config.method.name for config in configs))
    silos, rounds = sorted(configs[0].federation.silos), sum(config.rounds for config in configs)
    run = RunQueue(settings.folder).add(out, methods, rounds, silos)
    record_decision(settings.folder, "started", run=f"{run.number} in {out}")
    return run


def resume(settings: CoordinatorSettings, number: int, overrides: Sequence[str]) -> QueuedRun:
    """Queue a run again that failed or was stopped."""
    from silotune.distributed.coordinator.job import CoordinatorJob
    from silotune.runs.build.resolve import read_config

    run = RunQueue(settings.folder).run(number)
    if run.state not in ("failed", "stopped"):
        raise InputError(f"run {number}: is {run.state}; only runs that failed or were stopped can be resumed")
    for word in overrides:
        if not word.startswith("federation."):
            raise InputError(f"{word}: a run keeps its configuration; allowed here: federation.…=value")
    plan = CoordinatorJob.read(run.folder / "job.json") if not (run.folder / "config.yaml").exists() else None
    if plan is None:
        config = read_config(str(run.folder / "config.yaml"), list(overrides))
        return start(settings, config, Path(run.out), resume=True)
    cells = {name: read_config(plan.cell(name).config, list(overrides)) for name in plan.cells}
    return start_plan(settings, cells, Path(run.out)) or run


def stop(settings: CoordinatorSettings, number: int) -> QueuedRun:
    """Take a run out of the queue, or have `up` stop it. Its finished rounds are kept."""
    queue = RunQueue(settings.folder)
    run = queue.run(number)
    if run.is_over:
        raise InputError(f"run {number}: is {run.state} already")
    record_decision(settings.folder, "stopped", run=f"{number} in {run.out}")
    if run.state in ("queued", "waiting") or not is_locked(Path(settings.folder)):
        return queue.end(number, "stopped")
    return queue.change(number, stop=True)


def follow(
    settings: CoordinatorSettings, number: int, progress: Progress, announce: Callable[[str], None] | None = None
) -> None:
    """Wait until a run is over."""
    queue = RunQueue(settings.folder)
    run = queue.run(number)
    follower = RunFollower(run.folder, progress, announce)
    while not run.is_over:
        follower.poll()
        time.sleep(CHECK_INTERVAL)
        if not is_locked(Path(settings.folder)):
            raise SilotuneError(f"run {number}: the coordinator ended; when it is up again, the run goes on")
        run = queue.run(number)
    if run.state == "stopped":
        raise SilotuneError(f"run {number}: was stopped; `silotune federation resume` continues it")
    if run.state == "failed":
        status = read_status(run.folder)
        raise (InputError if status is not None and status.exit_code == 2 else SilotuneError)(run.error)


def require_up(settings: CoordinatorSettings) -> None:
    """Check that the coordinator's SuperLink runs."""
    if not is_locked(Path(settings.folder)):
        raise InputError(f"{settings.folder}: the coordinator does not run; `silotune federation up` starts it")
