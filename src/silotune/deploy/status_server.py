"""`status_server` serves `/` and `/metrics` of a coordinator on its `metrics_port`, on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from silotune.deploy.federation_metrics import current_run, federation_measures
from silotune.deploy.federation_status import Nodes, federation_status
from silotune.deploy.node_keys import node_statuses
from silotune.deploy.party_configs import CoordinatorSettings
from silotune.deploy.run_queue import RunQueue
from silotune.deploy.status_page import status_page
from silotune.distributed.processes.loopback_server import HOST, LoopbackServer, Page
from silotune.distributed.processes.metrics_text import metrics_page
from silotune.errors import SilotuneError

NODES_AGE = 30.0
"""Seconds for which the SuperLink's list of nodes is used: each asking starts one of Flower's commands."""


@contextmanager
def status_server(
    settings: CoordinatorSettings, say: Callable[[str], None], nodes: Nodes = node_statuses
) -> Iterator[LoopbackServer | None]:
    """Serve page and metrics while the context is open, if the coordinator's file has `metrics_port`.

    Args:
        settings: the coordinator's.
        say: called with the address.
        nodes: asks the SuperLink for its nodes.
    """
    if settings.metrics_port is None:
        yield None
        return
    recent = _RecentNodes(nodes)

    def page() -> Page:
        runs = RunQueue(Path(settings.folder)).runs()
        return Page(status_page(federation_status(settings, recent), runs, current_run(runs)).encode())

    metrics = metrics_page(lambda: federation_measures(settings, federation_status(settings, recent)))
    server = LoopbackServer(settings.metrics_port, {"/": page, "/metrics": metrics})
    say(f"status page on http://{HOST}:{server.port}/")
    try:
        yield server
    finally:
        server.close()


class _RecentNodes:
    """Asks the SuperLink for its nodes, and keeps the reply (or its failure) for a while."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._asked = float("-inf")
        self._reply: Mapping[str, str] | SilotuneError = {}

    def __call__(self, settings: CoordinatorSettings) -> Mapping[str, str]:
        with self._lock:
            if time.monotonic() - self._asked > NODES_AGE:
                try:
                    self._reply = self._nodes(settings)
                except SilotuneError as error:
                    self._reply = error
                self._asked = time.monotonic()
            if isinstance(self._reply, SilotuneError):
                raise self._reply
            return self._reply
