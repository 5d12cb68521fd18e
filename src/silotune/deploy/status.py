"""The state of a federation, for `silotune federation status` and for Prometheus."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silotune.core.clock import utc_now
from silotune.core.files import is_locked
from silotune.deploy.certificates import days_left
from silotune.deploy.nodes import node_statuses, registered_nodes
from silotune.deploy.queue import STATES, QueuedRun, RunQueue
from silotune.deploy.settings import CoordinatorSettings, NodeSettings, read_silo_or_node_settings
from silotune.distributed.coordinator.run_status import RunStatus, SiloEntry, read_status
from silotune.distributed.metrics import Labeled, certificate_measure, measure, read_link
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.worker import ping
from silotune.errors import SilotuneError
from silotune.runs.storage.readers import events
from silotune.version import __version__

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

SEARCHED_RUNS = 20
"""Newest runs in which a silo's last message is looked for."""

NODES_AGE = 30.0
"""Seconds for which metrics use the SuperLink's list of nodes: each asking starts one of Flower's commands."""

WAITS = "waits for approval"
"""State of a silo whose operator has to decide about the run."""

Nodes = Callable[[CoordinatorSettings], Mapping[str, str]]
"""Returns the status of each node in Flower's words, by silo."""

FAILURE_EVENTS = {"silo-failed": "failure", "refused": "refused"}
"""Kinds of events about a silo that went wrong, and what metrics call them."""


def federation_status(settings: CoordinatorSettings, nodes: Nodes = node_statuses) -> dict[str, Any]:
    """Return the state of a federation as plain values; None where something is not known."""
    folder = Path(settings.folder)
    running, problem = is_locked(folder), None
    online: Mapping[str, str] = {}
    if running:
        try:
            online = nodes(settings)
        except SilotuneError as error:
            problem = str(error)
    runs = RunQueue(folder).runs()
    statuses = {run.number: status for run in runs[-SEARCHED_RUNS:] if (status := read_status(run.folder))}
    active = next((run for run in runs if run.state == "running"), None)
    names = {*registered_nodes(settings), *online}
    names |= {silo for run in (*runs[-1:], active) if run is not None for silo in run.silos}
    known = running and problem is None
    return {
        "time": utc_now(),
        "coordinator": {
            "running": running,
            "superlink": problem,
            "version": __version__,
            "run": None if active is None else _run(active, statuses.get(active.number) or RunStatus()),
            "queue": [run.number for run in runs if run.state == "queued"],
            "waiting": [
                {"run": run.number, "method": run.method, "silos": silos, "out": run.out}
                for run in runs
                if (silos := run.waits_for())
            ],
            "failed": [_failed(run) for run in runs if run.state == "failed"],
            "disk_free_bytes": shutil.disk_usage(folder).free,
            "certificate_days": _days(settings),
        },
        "silos": [
            {"silo": name, "online": online.get(name) == "online" if known else None, **_silo(name, active, statuses)}
            for name in sorted(names)
        ],
    }


def silo_status(party: SiloSettings | NodeSettings, file: Path) -> dict[str, Any]:
    """Return the state of a silo, or of its node alone; of an installed silo the link is its node's, for root."""
    node, folder = file.with_name("node.yaml"), Path(party.folder)
    link, running, worker = read_link(folder), is_locked(folder), ping(party.socket_path)
    facts: dict[str, Any] = {"run": None, "waiting": [], "budget": None}
    if isinstance(party, SiloSettings):
        with suppress(OSError, SilotuneError):  # the node's files may be closed to the worker's user
            apart = read_silo_or_node_settings(node) if link is None and node.is_file() else party
            link = read_link(Path(apart.folder))
            running |= is_locked(Path(apart.folder))
        if folder.is_dir():
            facts |= _silo_records(party, worker)
    state = vars(link) if link is not None and (running or link.reason) else None  # of a node that ended, nobody knows
    return {"silo": party.name, "running": running, "worker": worker, **facts, "link": state}


def _silo_records(settings: SiloSettings, worker: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a silo's records tell of its last run, of runs that wait, and of its budget."""
    from silotune.distributed.silo.approvals import Approvals
    from silotune.distributed.silo.store import SiloStore

    folder = Path(settings.folder)
    if os.geteuid() == 0:  # files of the records that root would make are closed to the worker
        os.setegid(folder.stat().st_gid)
        os.seteuid(folder.stat().st_uid)
    store, approvals = SiloStore(folder, budget=settings.privacy), Approvals(folder).all()
    last = store.records.rows("SELECT run, kind, round FROM requests ORDER BY rowid DESC LIMIT 1")
    state: dict[str, Any] = {"waiting": [run.name for run in approvals if run.state == "pending"]}
    for run, kind, number in last:
        planned = {each.run: each.configuration.get("rounds") for each in approvals}
        state["run"] = {"run": run, "asked": kind, "round": number, "rounds": planned.get(run)}
        if worker is not None and worker.get("run") == run:
            state["run"]["rounds"] = worker.get("rounds")
    if (budget := settings.privacy) is not None:
        spent = store.ledger.spent(budget.unit) or 0.0
        rest, whose = max(0.0, budget.epsilon - spent), f"each {budget.unit}"
        assumed = store.ledger.assumed()
        state["budget"] = {"left": rest, "epsilon": budget.epsilon, "of": whose, "colluders": assumed}
    elif settings.budget is not None:
        rest = max(0.0, settings.budget - store.spent("").epsilon)
        state["budget"] = {"left": rest, "epsilon": settings.budget, "of": "noise on updates"}
    return state


def _days(settings: CoordinatorSettings) -> dict[str, int]:
    """Return the days left of the coordinator's certificate and its authority's, of those that can be read."""
    days = {}
    for name, path in (("coordinator", settings.certificate), ("authority", settings.ca)):
        with suppress(OSError, SilotuneError):
            days[name] = int(days_left(Path(path or "").read_bytes()))
    return days


def _run(run: QueuedRun, status: RunStatus) -> dict[str, Any]:
    return {
        "run": run.number,
        "method": run.method,
        "began": run.began or None,
        "round": status.round or None,
        "since": status.since or None,
        "finished_rounds": run.finished_rounds(),
        "rounds": run.rounds,
        "silos": list(run.silos),
        "activity": run.activity() or None,
        "out": run.out,
    }


def _failed(run: QueuedRun) -> dict[str, Any]:
    """Describe a failed run, with the reasons that silos gave in their last answers."""
    silos = (read_status(run.folder) or RunStatus()).silos
    reasons = {name: entry.failure for name, entry in silos.items() if entry.failure}
    return {"run": run.number, "ended": run.ended, "error": run.error, "reasons": reasons, "out": run.out}


def _silo(name: str, active: QueuedRun | None, statuses: Mapping[int, RunStatus]) -> dict[str, Any]:
    entries = [status.silos[name] for status in statuses.values() if name in status.silos]
    facts: dict[str, Any] = {"version": None, "protocol": None, "status": None}
    for entry in entries:  # oldest first
        facts |= {key: value for key in facts if (value := getattr(entry, key)) is not None}
    shared: dict[str, Any] = facts["status"] or {}
    now = None
    if active is not None and active.number in statuses:
        now = statuses[active.number].silos.get(name)
    return {
        "last_seen": max((entry.seen for entry in entries if entry.seen), default=None),
        "version": facts["version"],
        "protocol": facts["protocol"],
        "busy": None if now is None or active is None else _busy(now, active.number),
        "rows_fingerprint": shared.get("rows_fingerprint"),
        "epsilon_left": shared.get("epsilon_left"),
        "disk_free_bytes": shared.get("disk_free_bytes"),
    }


def _busy(entry: SiloEntry, run: int) -> dict[str, Any]:
    """Return a silo's state in the active run: `working`, `waits for approval` or `idle`."""
    if entry.waits:
        return {"state": WAITS, "run": run}
    if entry.asked is not None:
        return {"state": "working", "run": run, **entry.asked}
    return {"state": "idle", "run": run}


class FederationMetrics:
    """The coordinator's metrics for Prometheus; labels name runs, silos and kinds alone."""

    def __init__(self, settings: CoordinatorSettings, nodes: Nodes = node_statuses) -> None:
        self._settings = settings
        self._nodes = nodes
        self._lock = threading.Lock()
        self._listed = float("-inf")
        self._reply: Mapping[str, str] | SilotuneError = {}

    def measures(self) -> Iterator[Metric]:
        """Yield the present values."""
        status = federation_status(self._settings, self._recent_nodes)
        runs = RunQueue(self._settings.folder).runs()
        states = Counter(run.state for run in runs)
        yield measure("runs", "Runs by state.", [((state,), states[state]) for state in STATES], ["state"])
        coordinator = status["coordinator"]
        yield measure("queue_length", "Runs that wait.", len(coordinator["queue"]))
        free = coordinator["disk_free_bytes"]
        yield measure("disk_free_bytes", "Free space where the coordinator's folder is.", free)
        yield certificate_measure(coordinator["certificate_days"])
        waiting = {silo for run in coordinator["waiting"] for silo in run["silos"]}
        yield from _silo_measures(status["silos"], waiting)
        begun = [run for run in runs if run.state == "running"] or [run for run in runs if run.began]
        if begun:
            yield from _run_measures(max(begun, key=lambda run: run.began), coordinator["run"])

    def _recent_nodes(self, settings: CoordinatorSettings) -> Mapping[str, str]:
        """Ask the SuperLink for its nodes, or return its last reply (or failure) if that is recent."""
        with self._lock:
            if time.monotonic() - self._listed > NODES_AGE:
                try:
                    self._reply = self._nodes(settings)
                except SilotuneError as error:
                    self._reply = error
                self._listed = time.monotonic()
            if isinstance(self._reply, SilotuneError):
                raise self._reply
            return self._reply


def _silo_measures(silos: list[dict[str, Any]], waiting: Collection[str]) -> Iterator[Metric]:
    def gauge(name: str, description: str, value: Callable[[dict[str, Any]], float | None]) -> Metric:
        return measure(name, description, [((silo["silo"],), value(silo)) for silo in silos], ["silo"])

    online = [silo["online"] for silo in silos]
    yield measure("silos_online", "Silos that are connected.", None if None in online or not online else sum(online))
    yield gauge("silo_online", "Whether a silo is connected.", lambda silo: silo["online"])
    text = "Time of a silo's last message."
    yield gauge("silo_last_seen_timestamp_seconds", text, lambda silo: _timestamp(silo["last_seen"]))
    waits = "Whether a silo's operator must decide."
    yield gauge("silo_waits_for_approval", waits, lambda silo: silo["silo"] in waiting)


def _run_measures(run: QueuedRun, active: Mapping[str, Any] | None) -> Iterator[Metric]:
    def gauge(name: str, description: str, value: float | None) -> Metric:
        return measure(name, description, [((str(run.number),), value)], ["run"])

    number = str(run.number)
    if active is not None:
        since = _timestamp(active["since"])
        age = None if since is None else max(0.0, datetime.now(UTC).timestamp() - since)
        yield gauge("round", "Round that is worked on.", active["round"])
        yield gauge("round_age_seconds", "Time since that round began.", age)
        yield gauge("rounds_finished", "Finished rounds.", active["finished_rounds"])
        yield gauge("rounds_planned", "Rounds in all.", active["rounds"])
    status = read_status(run.folder) or RunStatus()
    for what in ("messages", "bytes"):
        values: Labeled = [((number, way), getattr(status, f"{what}_{way}")) for way in ("down", "up")]
        description = f"{what.capitalize()} to (down) and from (up) silos."
        yield measure(what, description, values, ("run", "direction"), "counter")
    counts = Counter(
        (event["silo"], FAILURE_EVENTS[event["event"]])
        for event in events(Path(run.out))
        if event.get("event") in FAILURE_EVENTS and event.get("silo") in run.silos
    )
    values = [((number, silo, kind), counts[silo, kind]) for silo in run.silos for kind in FAILURE_EVENTS.values()]
    labels = ("run", "silo", "kind")
    yield measure("silo_failures", "Requests that failed, and updates refused.", values, labels, "counter")


def _timestamp(time: str | None) -> float | None:
    """Return seconds since 1970 of a time in ISO format."""
    return None if time is None else datetime.fromisoformat(time).timestamp()
