"""Counts, times and sizes of a worker for Prometheus; nothing in them is about its rows."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from silotune.core.files import free_bytes
from silotune.distributed.metrics import link_measures, measure
from silotune.distributed.protocol.frames import Frame, decode
from silotune.distributed.silo.policy import POLICY_REFUSES
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.store import SiloStore

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

KINDS = ("hello", "round", "final", "score")
"""Kinds of requests; any other is counted as `other`, because the coordinator chooses the word."""

OUTCOMES = ("answered", "waiting", "refused", "refused by policy", "failed")


class WorkerMetrics:
    """Counts a worker's requests."""

    def __init__(self, settings: SiloSettings) -> None:
        self._settings = settings
        self._store = SiloStore(Path(settings.folder))
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._seconds = 0.0

    def count(self, kind: str, reply: bytes, seconds: float) -> None:
        """Count a request that was worked on."""
        with self._lock:
            self._requests[kind if kind in KINDS else "other", _outcome(decode(reply))] += 1
            self._seconds += seconds

    def measures(self) -> Iterator[Metric]:
        """Yield the present values."""
        with self._lock:
            requests, seconds = Counter(self._requests), self._seconds
        values = [((kind, outcome), requests[kind, outcome]) for kind in (*KINDS, "other") for outcome in OUTCOMES]
        yield measure("worker_requests", "Requests by kind and outcome.", values, ("kind", "outcome"), "counter")
        yield measure("worker_busy_seconds", "Time spent on requests.", seconds, kind="counter")
        free = free_bytes(Path(self._settings.folder))
        yield measure("worker_disk_free_bytes", "Free space for its states.", free)
        run, numbers = self._store.last_run()
        yield measure("worker_run_numbers", "Numbers that left in the last run.", numbers if run else None)
        description = "Epsilon of all noised replies, plainly added up: what composition counts is less."
        yield measure("worker_epsilon_sum", description, self._store.spent("").epsilon)
        yield measure("worker_epsilon_budget", "Epsilon of all runs together.", self._settings.budget)
        yield from link_measures(Path(self._settings.folder))  # where `federation join` runs worker and node


def _outcome(reply: Frame) -> str:
    if reply.kind == "refused" and POLICY_REFUSES in str(reply.fields.get("reason", "")):
        return "refused by policy"
    return reply.kind if reply.kind in ("waiting", "refused", "failed") else "answered"
