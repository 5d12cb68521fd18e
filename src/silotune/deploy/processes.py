"""Run a party's processes in the foreground until one of them ends (`federation up`, `federation join`).

Whoever starts these commands (the systemd units, compose) starts them again, keeps their output, and limits it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO, Any

from silotune.cli.termination import ended_by_sigterm, until_interrupted
from silotune.core.clock import log_line, logs_json, utc_now
from silotune.core.files import folder_lock, is_locked, write_text
from silotune.core.surroundings import require_posix
from silotune.deploy.certificates import days_left
from silotune.deploy.enrollment import ask, serve_enrollment
from silotune.deploy.nodes import record_decision
from silotune.deploy.queue import CHECK_INTERVAL
from silotune.deploy.scheduler import Scheduler
from silotune.deploy.settings import CoordinatorSettings, NodeSettings
from silotune.deploy.status import FederationMetrics
from silotune.distributed.coordinator.run_status import STARTUP_TIMEOUT
from silotune.distributed.flower import supernode
from silotune.distributed.flower.commands import (
    flower_environment,
    listens,
    require_flower,
    superlink_command,
    supernode_command,
)
from silotune.distributed.flower.database import keep_database
from silotune.distributed.metrics import LINK_FILE, LinkState, link_measures, read_link, serve_metrics
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.errors import InputError, SilotuneError, file_errors

GRACE = 20.0
"""Seconds for a process to end by itself."""

IDLE_INTERVAL = 2.0
"""Seconds between looks at the queue while no run is active."""

TRY_INTERVAL = 30.0
"""Seconds between tries whether the coordinator answers."""

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h

_COLORS = re.compile(r"\x1b\[[0-9;]*m")

_HINTS = {"supernode": "; code 2004 above: its key is not admitted, or its last node was killed a moment ago"}


class LinkLost(SilotuneError):
    """The node gave up its link to the coordinator, most often after an error of TLS; it has to be started again."""

    exit_code = supernode.LINK_LOST


def up(settings: CoordinatorSettings, say: Callable[[str], None]) -> None:
    """Run the SuperLink, the queue of runs, and the endpoint for invited silos, until Ctrl-C or SIGTERM."""
    require_posix("silotune federation up")
    require_flower()
    folder = Path(settings.folder)
    options = ["--insecure"]
    if not settings.insecure:
        options = ["--ssl-ca-certfile", str(settings.ca), "--ssl-certfile", str(settings.certificate)]
        options += ["--ssl-keyfile", str(settings.key), "--enable-supernode-auth"]
    database = folder / "superlink.db"
    options += ["--database", str(database)]
    with _processes(folder) as processes:
        _require_free(settings.port)
        enrollment = serve_enrollment(settings, say)
        serve_metrics(settings.metrics_port, FederationMetrics(settings).measures)
        if copy := keep_database(database):
            say(f"this Flower changes {database.name}, which an older one cannot read then; as it was: {copy}")
        processes.start("superlink", superlink_command(settings.host, settings.port, options))
        _await_superlink(settings, processes)
        record_decision(settings.folder, "up")
        say(f"SuperLink on {settings.address}")
        scheduler, certificate = Scheduler(settings, say), _certificate(settings)
        while True:
            scheduler.tick()
            processes.check()
            idle = scheduler.idle
            if (renewed := _certificate(settings)) != certificate and idle:
                certificate = renewed
                if enrollment is not None:
                    enrollment.context.load_cert_chain(str(settings.certificate), settings.key)
                processes.restart("superlink")
                _await_superlink(settings, processes)
                say("the certificate was renewed; the SuperLink has the new one")
            time.sleep(IDLE_INTERVAL if idle else CHECK_INTERVAL)


def _require_free(port: int) -> None:
    """Refuse a port that is in use, which Flower would say between lines of a traceback."""
    if listens(port):
        raise InputError(f"port {port}: is in use; end what listens there, or set another port")


def _certificate(settings: CoordinatorSettings) -> bytes:
    return b"" if settings.certificate is None else Path(settings.certificate).read_bytes()


def _await_superlink(settings: CoordinatorSettings, processes: _Processes) -> None:
    until = time.monotonic() + STARTUP_TIMEOUT
    while not listens(settings.port):
        processes.check()
        if time.monotonic() > until:
            raise SilotuneError(f"the SuperLink does not listen after {STARTUP_TIMEOUT:g} s")
        time.sleep(0.1)


def join(path: Path, settings: SiloSettings | NodeSettings, say: Callable[[str], None]) -> None:
    """Run a silo's worker and SuperNode until Ctrl-C or SIGTERM; for a node's file the SuperNode alone."""
    require_posix("silotune federation join")
    require_flower()
    assert settings.superlink is not None, "the file was checked"
    options, link = ["--insecure"], NodeLink(settings)
    if not settings.insecure:
        link.try_now()  # Flower would not say why
        options = ["--root-certificates", str(settings.root_certificates)]
        options += ["--auth-supernode-private-key", str(settings.private_key)]
    with _processes(Path(settings.folder)) as processes:
        _require_free(settings.port)
        if isinstance(settings, SiloSettings):
            processes.start("worker", [sys.executable, "-m", "silotune", "worker", str(path.resolve())])
        else:
            serve_metrics(settings.metrics_port, partial(link_measures, Path(settings.folder)))
        words = supernode_command(settings.superlink, settings.port, settings.name, settings.socket_path, options)
        processes.start("supernode", [sys.executable, "-m", supernode.__name__, *words[1:]])
        say(f"silo {settings.name!r} joins {settings.superlink}")
        while True:
            try:
                processes.check()
            except LinkLost as lost:
                link.keep(str(lost))
                raise
            if not settings.insecure:
                link.look()
            time.sleep(CHECK_INTERVAL)


def end_with_parent() -> None:
    """Have Linux end a new process when the one that began it is killed, so that its ports and sockets are free."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Processes:
    """The children of this process, which write where it writes."""

    def __init__(self, folder: Path) -> None:
        self._environment = flower_environment(folder / "flwr")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._words: dict[str, list[str]] = {}

    def start(self, name: str, words: list[str]) -> None:
        """Start another process."""
        output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if logs_json() else {}
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, env=self._environment, preexec_fn=end_with_parent, **output
        )
        self._running[name], self._words[name] = process, words
        if process.stdout is not None:
            Thread(target=_log_as_json, args=(name, process.stdout), daemon=True).start()

    def check(self) -> None:
        """Check that all of them run."""
        for name, process in self._running.items():
            if process.poll() == supernode.LINK_LOST:
                raise LinkLost(f"{name}: lost its link for good (see above); start it again")
            if process.poll() is not None:
                raise SilotuneError(f"{name}: ended with code {process.returncode}{_HINTS.get(name, '')}")

    def restart(self, name: str) -> None:
        """End one, and start it again."""
        self._end([self._running[name]])
        self.start(name, self._words[name])

    def end(self) -> None:
        """End all of them."""
        self._end(self._running.values())

    def _end(self, processes: Collection[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class NodeLink:
    """Tries whether the coordinator answers, with the node's own settings and this machine's proxy."""

    def __init__(self, settings: SiloSettings | NodeSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._next = 0.0

    def try_now(self) -> None:
        """Try, and keep the result."""
        self._next = time.monotonic() + TRY_INTERVAL
        address, authority = str(self._settings.superlink), Path(str(self._settings.root_certificates))
        try:
            status, answer = ask(address, authority, "GET", "/health", seconds=10)
            if status != 200:
                raise SilotuneError(f"coordinator {address}: /health answers {status}")
        except SilotuneError as error:
            self.keep(str(error))
            raise
        self.keep("", {"coordinator": answer["days"], "authority": days_left(authority.read_bytes())})

    def look(self) -> None:
        """Try if it is time; a failure is kept alone, as Flower's node tries again by itself."""
        if time.monotonic() >= self._next:
            try:
                self.try_now()
            except SilotuneError:
                return

    def keep(self, reason: str, days: dict[str, float] | None = None) -> None:
        """Keep that the link is up, or the reason why it is not, and certificates' days left.

        While it is down, nobody knows of the coordinator's certificate.
        """
        before = read_link(self._folder)
        same = before is not None and (not before.reason) == (not reason)
        before = before or LinkState("", "", 0, {})
        since, losses = before.since if same else utc_now(), before.losses + (bool(reason) and not same)
        terms = {name: number for name, number in before.days.items() if name == "authority"} if days is None else days
        whole_days = {name: int(number) for name, number in terms.items()}
        state = LinkState(since, reason, losses, whole_days)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_text(self._folder / LINK_FILE, json.dumps(vars(state)))


def _log_as_json(name: str, output: IO[bytes]) -> None:
    """Log a process's lines, without their colors; those of silotune's own are JSON already."""
    for line in output:
        text = _COLORS.sub("", line.decode(errors="replace")).strip()
        if text.startswith("{"):
            print(text, flush=True)
        elif text:
            log_line(f"{name}: {text}", sys.stdout)


@contextmanager
def _processes(folder: Path) -> Iterator[_Processes]:
    """Lock a party's folder, and end the processes that were started when the block ends; Ctrl-C ends it in order."""
    with file_errors(f"folder {folder}: must be this user's own"):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    if is_locked(folder):
        raise InputError(f"{folder}: already running")
    running = _Processes(folder)
    with folder_lock(folder), contextlib.suppress(KeyboardInterrupt), ended_by_sigterm():
        try:
            with until_interrupted():
                yield running
        finally:
            running.end()
