"""`silotune federation start`, `runs`, `stop`, `resume`: change the queue, whose runs `up` submits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from silotune.config import Config
from silotune.deploy.node_keys import record_decision
from silotune.deploy.party_configs import CoordinatorSettings
from silotune.deploy.party_processes import CHECK_INTERVAL, is_running
from silotune.deploy.run_queue import QueuedRun, RunQueue
from silotune.distributed.coordinator.job import prepare
from silotune.distributed.coordinator.run_registry import FEDERATION_FOLDER
from silotune.distributed.coordinator.status_files import CoordinatorMonitor, read_progress, require_finished
from silotune.distributed.flower.commands import require_flower
from silotune.errors import InputError, SilotuneError
from silotune.runs.build.resolve import read_config


def start(settings: CoordinatorSettings, config: Config, out: Path, resume: bool = False) -> QueuedRun:
    """Queue a run; the coordinator's `up` submits it when the runs before it are over.

    Args:
        settings: the coordinator's.
        config: the run's configuration.
        out: the run folder.
        resume: continue an interrupted run.
    """
    require_flower()
    require_up(settings)
    prepare(config, out, resume)
    silos = tuple(sorted(config.federation.silos))
    run = RunQueue(Path(settings.folder)).add(out, config.method.name, config.rounds, silos)
    record_decision(settings, "started", run=f"{run.number} in {out}")
    return run


def resume(settings: CoordinatorSettings, number: int, overrides: Sequence[str]) -> QueuedRun:
    """Queue a run again that failed or was stopped.

    Args:
        settings: the coordinator's.
        number: the run's number.
        overrides: `federation.…=value`, e.g. another quorum, or other silos.
    """
    run = RunQueue(Path(settings.folder)).run(number)
    if run.state not in ("failed", "stopped"):
        raise InputError(f"run {number}: is {run.state}; only runs that failed or were stopped can be resumed")
    for word in overrides:
        if not word.startswith("federation."):
            raise InputError(f"{word}: a run keeps its configuration; allowed here: federation.…=value")
    config = read_config(str(Path(run.out) / FEDERATION_FOLDER / "config.yaml"), list(overrides))
    return start(settings, config, Path(run.out), resume=True)


def stop(settings: CoordinatorSettings, number: int) -> QueuedRun:
    """Stop a run, or take it out of the queue. Its finished rounds are kept.

    Args:
        settings: the coordinator's.
        number: the run's number.

    Returns:
        The run; `up` ends one that is running.
    """
    queue = RunQueue(Path(settings.folder))
    run = queue.run(number)
    if run.is_over:
        raise InputError(f"run {number}: is {run.state} already")
    record_decision(settings, "stopped", run=f"{number} in {run.out}")
    if run.state == "queued" or not is_running(Path(settings.folder)):
        return queue.end(number, "stopped")
    return queue.change(number, stop=True)


def follow(
    settings: CoordinatorSettings,
    number: int,
    progress: Callable[[int, str, int, int], None],
    announce: Callable[[str], None] | None = None,
) -> None:
    """Wait until a run is over.

    Args:
        settings: the coordinator's.
        number: the run's number.
        progress: called with the coordinator's progress.
        announce: called with each line of the privacy guarantee.

    Raises:
        SilotuneError: the run failed or was stopped, or `up` ended.
    """
    queue = RunQueue(Path(settings.folder))
    run = queue.run(number)
    monitor = CoordinatorMonitor(Path(run.out) / FEDERATION_FOLDER, progress, announce)
    while not run.is_over:
        monitor.poll()
        time.sleep(CHECK_INTERVAL)
        if not is_running(Path(settings.folder)):
            raise SilotuneError(f"run {number}: the coordinator ended; when it is up again, the run goes on")
        run = queue.run(number)
    if run.state == "stopped":
        raise SilotuneError(f"run {number}: was stopped; `silotune federation resume` continues it")
    outcome = monitor.outcome() or {"state": "finished"}
    if run.state == "failed":
        outcome = outcome | {"state": "failed", "error": run.error}
    require_finished(outcome)


def listed(settings: CoordinatorSettings) -> list[dict[str, Any]]:
    """Return the coordinator's runs as plain values, oldest first, with the rounds that are finished."""
    runs = []
    for run in RunQueue(Path(settings.folder)).runs():
        runs.append(
            {
                "run": run.number,
                "state": "stopping" if run.stop else run.state,
                "method": run.method,
                "round": finished_rounds(run),
                "rounds": run.rounds,
                "silos": list(run.silos),
                "activity": activity(run) if run.state == "running" else "",
                "queued": run.queued,
                "began": run.began,
                "ended": run.ended,
                "error": run.error,
                "out": run.out,
            }
        )
    return runs


def damaged(settings: CoordinatorSettings) -> list[str]:
    """Return a line for each run whose file cannot be read."""
    return RunQueue(Path(settings.folder)).damaged()


def finished_rounds(run: QueuedRun) -> int:
    """Return the number of the last round that has a checkpoint."""
    rounds = [path.stem.removeprefix("round-") for path in (Path(run.out) / "checkpoints").glob("round-*.json")]
    return max((int(number) for number in rounds if number.isdigit()), default=0)


def activity(run: QueuedRun) -> str:
    """Return a running coordinator's activity, e.g. the silos it waits for; empty if it says none."""
    progress = read_progress(Path(run.out) / FEDERATION_FOLDER)
    return "" if progress is None else progress[1]


def require_up(settings: CoordinatorSettings) -> None:
    """Check that the coordinator's SuperLink runs."""
    if not is_running(Path(settings.folder)):
        raise InputError(f"{settings.folder}: the coordinator does not run; `silotune federation up` starts it")
