"""Run a party's processes in the foreground until one of them ends (`federation up`, `federation join`).

Whoever starts these commands (the systemd units, compose) starts them again, keeps their output, and limits it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from silotune.cli.termination import ended_by_sigterm
from silotune.core.locking import folder_lock, is_locked
from silotune.core.surroundings import require_posix
from silotune.deploy.enrollment import ask, serve_enrollment
from silotune.deploy.nodes import record_decision
from silotune.deploy.queue import CHECK_INTERVAL, Scheduler
from silotune.deploy.settings import CoordinatorSettings, NodeSettings
from silotune.deploy.status import FederationMetrics
from silotune.distributed.coordinator.run_status import STARTUP_TIMEOUT
from silotune.distributed.flower.commands import (
    flower_environment,
    listens,
    require_flower,
    superlink_command,
    supernode_command,
)
from silotune.distributed.metrics import serve_metrics
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.errors import InputError, SilotuneError

GRACE = 20.0
"""Seconds for a process to end by itself."""

_HINTS = {"supernode": "; code 2004 above: its key is not admitted, or its last node was killed a moment ago"}


def up(settings: CoordinatorSettings, say: Callable[[str], None]) -> None:
    """Run the SuperLink, the queue of runs, and the endpoint for invited silos, until Ctrl-C or SIGTERM.

    Args:
        settings: the coordinator's.
        say: called with messages for the operator.
    """
    require_posix("silotune federation up")
    require_flower()
    folder = Path(settings.folder)
    options = ["--insecure"]
    if not settings.insecure:
        options = ["--ssl-ca-certfile", str(settings.ca), "--ssl-certfile", str(settings.certificate)]
        options += ["--ssl-keyfile", str(settings.key), "--enable-supernode-auth"]
    options += ["--database", str(folder / "superlink.db")]
    with _processes(folder) as processes:
        if listens(settings.port):
            raise InputError(f"port {settings.port}: is in use; end what listens there, or set another port")
        serve_enrollment(settings, say)
        serve_metrics(settings.metrics_port, FederationMetrics(settings).measures)
        processes.start("superlink", superlink_command(settings.host, settings.port, options))
        until = time.monotonic() + STARTUP_TIMEOUT
        while not listens(settings.port):
            processes.check()
            if time.monotonic() > until:
                raise SilotuneError(f"the SuperLink does not listen after {STARTUP_TIMEOUT:g} s")
            time.sleep(0.1)
        record_decision(settings.folder, "up")
        say(f"SuperLink on {settings.address}")
        scheduler = Scheduler(settings, say)
        while True:
            scheduler.tick()
            processes.check()
            time.sleep(CHECK_INTERVAL)


def join(path: Path, settings: SiloSettings | NodeSettings, say: Callable[[str], None]) -> None:
    """Run a silo's worker and SuperNode until Ctrl-C or SIGTERM; for a node's file the SuperNode alone.

    Args:
        path: the file.
        settings: its content.
        say: called with messages for the operator.
    """
    require_posix("silotune federation join")
    require_flower()
    assert settings.superlink is not None, "the file was checked"
    options = ["--insecure"]
    if not settings.insecure:
        ask(settings.superlink, Path(str(settings.root_certificates)), "GET", "/health")  # Flower would not say why
        options = ["--root-certificates", str(settings.root_certificates)]
        options += ["--auth-supernode-private-key", str(settings.private_key)]
    with _processes(Path(settings.folder)) as processes:
        if isinstance(settings, SiloSettings):
            processes.start("worker", [sys.executable, "-m", "silotune", "worker", str(path.resolve())])
        words = supernode_command(settings.superlink, settings.port, settings.name, settings.socket_path, options)
        processes.start("supernode", words)
        say(f"silo {settings.name!r} joins {settings.superlink}")
        while True:
            processes.check()
            time.sleep(CHECK_INTERVAL)


class _Processes:
    """The children of this process, which write where it writes."""

    def __init__(self, folder: Path) -> None:
        self._environment = flower_environment(folder / "flwr")
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, words: list[str]) -> None:
        """Start another process."""
        self._running[name] = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=self._environment)

    def check(self) -> None:
        """Check that all of them run."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise SilotuneError(f"{name}: ended with code {process.returncode}{_HINTS.get(name, '')}")

    def end(self) -> None:
        """End all of them."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _processes(folder: Path) -> Iterator[_Processes]:
    """Lock a party's folder, and end the processes that were started when the block ends; Ctrl-C ends it in order."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    if is_locked(folder):
        raise InputError(f"{folder}: already running")
    running = _Processes(folder)
    with folder_lock(folder), contextlib.suppress(KeyboardInterrupt), ended_by_sigterm():
        try:
            yield running
        finally:
            running.end()
