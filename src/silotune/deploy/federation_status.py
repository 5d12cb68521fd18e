"""`federation_status`: runs, silos, nodes, disk of a coordinator as plain values; None where unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from silotune.core.clock import utc_now
from silotune.deploy.node_keys import node_statuses, registered_nodes
from silotune.deploy.party_configs import CoordinatorSettings
from silotune.deploy.party_processes import is_running
from silotune.deploy.run_commands import activity, finished_rounds
from silotune.deploy.run_queue import QueuedRun, RunQueue
from silotune.distributed.coordinator.run_registry import FEDERATION_FOLDER
from silotune.distributed.coordinator.silo_board import read_board
from silotune.distributed.silo.operation_status import free_bytes
from silotune.errors import SilotuneError
from silotune.version import __version__

SEARCHED_RUNS = 20
"""Newest runs in which a silo's last message is looked for."""

Nodes = Callable[[CoordinatorSettings], Mapping[str, str]]
"""Returns the status of each node in Flower's words, by silo."""


def federation_status(settings: CoordinatorSettings, nodes: Nodes = node_statuses) -> dict[str, Any]:
    """Return the state of a federation.

    Args:
        settings: the coordinator's.
        nodes: asks the SuperLink for its nodes.
    """
    folder = Path(settings.folder)
    running, problem = is_running(folder), None
    online: Mapping[str, str] = {}
    if running:
        try:
            online = nodes(settings)
        except SilotuneError as error:
            problem = str(error)
    runs = RunQueue(folder).runs()
    known = running and problem is None
    names = {*registered_nodes(settings), *online, *(silo for run in runs[-1:] for silo in run.silos)}
    boards = [(run, read_board(Path(run.out) / FEDERATION_FOLDER)) for run in runs[-SEARCHED_RUNS:]]
    active = next((run for run in runs if run.state == "running"), None)
    names |= set(active.silos) if active is not None else set()
    return {
        "time": utc_now(),
        "coordinator": {
            "running": running,
            "superlink": problem,
            "version": __version__,
            "run": None if active is None else _run(active, boards),
            "queue": [run.number for run in runs if run.state == "queued"],
            "disk_free_bytes": free_bytes(folder),
        },
        "silos": [_silo(name, online.get(name) if known else None, known, active, boards) for name in sorted(names)],
    }


Boards = list[tuple[QueuedRun, dict[str, Any] | None]]


def _run(run: QueuedRun, boards: Boards) -> dict[str, Any]:
    board = _board(run, boards) or {}
    return {
        "run": run.number,
        "method": run.method,
        "began": run.began or None,
        "round": board.get("round"),
        "since": board.get("since") or None,
        "finished_rounds": finished_rounds(run),
        "rounds": run.rounds,
        "silos": list(run.silos),
        "activity": activity(run) or None,
        "out": run.out,
    }


def _silo(name: str, state: str | None, known: bool, active: QueuedRun | None, boards: Boards) -> dict[str, Any]:
    entries = [board["silos"][name] for _, board in boards if board is not None and name in board["silos"]]
    seen = max((entry["seen"] for entry in entries if entry["seen"]), default=None)
    told = {"version": None, "protocol": None, "status": None}
    for entry in entries:  # oldest first
        told |= {key: entry[key] for key in told if entry[key] is not None}
    status: dict[str, Any] = told["status"] or {}
    return {
        "silo": name,
        "online": (state == "online") if known else None,
        "last_seen": seen,
        "version": told["version"],
        "protocol": told["protocol"],
        "busy": _busy(name, active, boards),
        "rows_fingerprint": status.get("rows_fingerprint"),
        "epsilon_left": status.get("epsilon_left"),
        "disk_free_bytes": status.get("disk_free_bytes"),
    }


def _busy(name: str, active: QueuedRun | None, boards: Boards) -> dict[str, Any] | None:
    """Return what a silo does for the active run: `state` is `working`, `waits for approval` or `idle`."""
    board = None if active is None else _board(active, boards)
    if active is None or board is None or name not in board["silos"]:
        return None
    entry = board["silos"][name]
    if entry["waits"]:
        return {"state": "waits for approval", "run": active.number}
    if entry["asked"] is not None:
        return {"state": "working", "run": active.number, **entry["asked"]}
    return {"state": "idle", "run": active.number}


def _board(run: QueuedRun, boards: Boards) -> dict[str, Any] | None:
    return next((board for other, board in boards if other.number == run.number), None)
