"""`federation_measures`: the coordinator's metrics for Prometheus; labels name runs, silos, kinds alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from silotune.deploy.party_configs import CoordinatorSettings
from silotune.deploy.run_queue import QueuedRun, RunQueue, RunState
from silotune.distributed.coordinator.run_registry import FEDERATION_FOLDER
from silotune.distributed.coordinator.silo_board import read_board
from silotune.distributed.processes.metrics_text import Measure
from silotune.runs.storage.readers import events

FAILURE_EVENTS = {"silo-failed": "failure", "refused": "refused"}
"""Kinds of events about a silo that went wrong, and what metrics call them."""

_STATES: tuple[RunState, ...] = ("queued", "running", "finished", "failed", "stopped")


def federation_measures(settings: CoordinatorSettings, status: Mapping[str, Any]) -> Iterator[Measure]:
    """Yield the metrics of a coordinator.

    Args:
        settings: the coordinator's.
        status: as `federation_status` returns it.
    """
    runs = RunQueue(Path(settings.folder)).runs()
    states = Counter(run.state for run in runs)
    yield Measure("runs", "gauge", "Runs by state.", ("state",), [((state,), states[state]) for state in _STATES])
    yield Measure("queue_length", "gauge", "Runs that wait.", (), [((), len(status["coordinator"]["queue"]))])
    disk = status["coordinator"]["disk_free_bytes"]
    yield Measure("disk_free_bytes", "gauge", "Free space where the coordinator's folder is.", (), [((), disk)])
    yield from _silo_measures(status["silos"])
    current = current_run(runs)
    if current is not None:
        yield from _run_measures(current, status["coordinator"]["run"])


def current_run(runs: list[QueuedRun]) -> QueuedRun | None:
    """Return the run that is running, else the one that ended last; None before the first."""
    active = [run for run in runs if run.state == "running"]
    begun = active or [run for run in runs if run.began]
    return max(begun, key=lambda run: run.began, default=None)


def _silo_measures(silos: list[dict[str, Any]]) -> Iterator[Measure]:
    online = [silo["online"] for silo in silos]
    known = None if None in online or not online else sum(online)
    yield Measure("silos_online", "gauge", "Silos that are connected.", (), [((), known)])
    values: list[tuple[tuple[str, ...], float | None]] = [((silo["silo"],), silo["online"]) for silo in silos]
    yield Measure("silo_online", "gauge", "Whether a silo is connected.", ("silo",), values)
    values = [((silo["silo"],), _timestamp(silo["last_seen"])) for silo in silos]
    yield Measure("silo_last_seen_timestamp_seconds", "gauge", "Time of a silo's last message.", ("silo",), values)
    values = [
        ((silo["silo"],), None if silo["busy"] is None else silo["busy"]["state"] == "waits for approval")
        for silo in silos
    ]
    yield Measure("silo_waits_for_approval", "gauge", "Whether a silo's operator must decide.", ("silo",), values)


def _run_measures(run: QueuedRun, active: Mapping[str, Any] | None) -> Iterator[Measure]:
    number = (str(run.number),)
    if active is not None:
        since = _timestamp(active["since"])
        age = None if since is None else max(0.0, datetime.now(UTC).timestamp() - since)
        yield Measure("round", "gauge", "Round that is worked on.", ("run",), [(number, active["round"])])
        yield Measure("round_age_seconds", "gauge", "Time since that round began.", ("run",), [(number, age)])
        yield Measure("rounds_finished", "gauge", "Finished rounds.", ("run",), [(number, active["finished_rounds"])])
        yield Measure("rounds_planned", "gauge", "Rounds in all.", ("run",), [(number, active["rounds"])])
    board = read_board(Path(run.out) / FEDERATION_FOLDER) or {}
    for what in ("messages", "bytes"):
        values = [((*number, way), board.get(f"{what}_{way}")) for way in ("down", "up")]
        description = f"{what.capitalize()} to (down) and from (up) silos."
        yield Measure(what, "counter", description, ("run", "direction"), values)
    counts = Counter(
        (event["silo"], FAILURE_EVENTS[event["event"]])
        for event in events(Path(run.out))
        if event.get("event") in FAILURE_EVENTS and event.get("silo") in run.silos
    )
    failures: list[tuple[tuple[str, ...], float | None]] = [
        ((*number, silo, kind), counts[silo, kind]) for silo in run.silos for kind in FAILURE_EVENTS.values()
    ]
    labels = ("run", "silo", "kind")
    yield Measure("silo_failures", "counter", "Requests that failed, and updates refused.", labels, failures)


def _timestamp(time: str | None) -> float | None:
    """Return seconds since 1970 of a time in ISO format."""
    return None if time is None else datetime.fromisoformat(time).timestamp()
