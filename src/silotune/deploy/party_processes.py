"""`silotune federation up`, `join`, `down` and a silo's `status`: processes kept running in the foreground.

`up` and `join` stay in the foreground and restart their processes, as systemd and containers expect.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from silotune.core.files import write_text
from silotune.core.locking import folder_lock, is_locked
from silotune.deploy.node_keys import record_decision
from silotune.deploy.party_configs import (
    CoordinatorSettings,
    NodeSettings,
    read_party,
    read_silo_or_node_settings,
)
from silotune.deploy.scheduler import Scheduler
from silotune.distributed.coordinator.status_files import STARTUP_TIMEOUT, read_json
from silotune.distributed.flower.commands import ENVIRONMENT, require_flower, superlink_command, supernode_command
from silotune.distributed.processes.ports import wait_for_port
from silotune.distributed.processes.supervisor import ManagedProcess, Supervisor
from silotune.distributed.processes.watchdog import end_process_group, process_group
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.worker import ping
from silotune.errors import InputError, SilotuneError

CHECK_INTERVAL = 0.5
"""Seconds between checks of the processes."""

RESTART_DELAYS = (1.0, 5.0, 15.0, 30.0)
"""Seconds before the first, second, … restart; the last for all further ones.

The SuperLink refuses a node that was killed for up to a minute."""


def up(config: CoordinatorSettings, say: Callable[[str], None]) -> None:
    """Run the SuperLink until Ctrl-C, SIGTERM or `down`.

    Args:
        config: the coordinator's settings.
        say: called with messages for the operator.
    """
    require_flower()
    folder = Path(config.folder)
    with _supervised(folder) as supervisor:
        options = ["--insecure"]
        if not config.insecure:
            options = ["--ssl-ca-certfile", str(config.ca), "--ssl-certfile", str(config.certificate)]
            options += ["--ssl-keyfile", str(config.key), "--enable-supernode-auth"]
        options += ["--database", str(folder / "superlink.db")]
        link = supervisor.start("superlink", superlink_command(config.host, config.port, options))
        wait_for_port(link, config.port, STARTUP_TIMEOUT)
        record_decision(config, "up")
        say(f"SuperLink on {config.address}; logs: {folder / 'logs'}")
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C, or `down`
            _keep_running(supervisor, say, Scheduler(config, say).tick)


def join(path: Path, config: SiloSettings | NodeSettings, say: Callable[[str], None]) -> None:
    """Run a silo's worker and SuperNode until Ctrl-C, SIGTERM or `down`; for a node's file the SuperNode alone.

    Args:
        path: the file.
        config: the content of the party's settings.
        say: called with messages for the operator.
    """
    require_flower()
    assert config.superlink is not None, "the file was checked"
    if not config.insecure:
        assert config.root_certificates is not None, "the file was checked"
        problem = check_tls(config.superlink, config.root_certificates)
        if problem:
            say(f"{problem}; goes on trying")
    with _supervised(Path(config.folder)) as supervisor:
        options = ["--insecure"]
        if not config.insecure:
            options = ["--root-certificates", str(config.root_certificates)]
            options += ["--auth-supernode-private-key", str(config.private_key)]
        if isinstance(config, SiloSettings):
            supervisor.start("worker", [sys.executable, "-m", "silotune", "worker", str(path.resolve())])
        command = supernode_command(config.superlink, config.port, config.name, config.socket_path, options)
        supervisor.start("supernode", command)
        say(f"silo {config.name!r} joins {config.superlink}; logs: {Path(config.folder) / 'logs'}")
        with contextlib.suppress(KeyboardInterrupt):
            _keep_running(supervisor, say)


def check_tls(address: str, certificates: str) -> str:
    """Check that the party at an address has a certificate by these authorities.

    Flower's SuperNode retries for ever, even if no retry can succeed.

    Args:
        address: HOST:PORT.
        certificates: file of the authorities.

    Returns:
        A problem that may pass, such as an unreachable address; empty if there is none.
    """
    host, _, port = address.rpartition(":")
    try:
        context = ssl.create_default_context(cafile=certificates)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"root_certificates {certificates}: cannot be used ({error})") from error
    bare = host.strip("[]")
    try:
        with (
            socket.create_connection((bare, int(port)), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname=bare),
        ):
            return ""
    except ssl.SSLCertVerificationError as error:
        raise InputError(
            f"superlink {address}: its certificate is not one that root_certificates vouches for "
            f"({error.verify_message})"
        ) from error
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            raise InputError(f"superlink {address}: does not speak TLS") from error
        return f"superlink {address}: TLS failed ({error.reason})"
    except OSError as error:
        return f"superlink {address}: not reachable ({error.strerror or error})"


def status(path: Path) -> list[str]:
    """Return lines on which processes of a silo's or node's file run."""
    config = read_silo_or_node_settings(path)
    state = silo_status(config)
    worker = state["worker"]
    return [
        f"silo {config.name!r}: {'running' if state['running'] else 'not running'}",
        "worker: " + ("no answer" if worker is None else str(worker.get("busy") or "ready")),
    ]


def silo_status(config: SiloSettings | NodeSettings) -> dict[str, Any]:
    """Return the state of a silo's processes on this machine; `worker` is None if it does not answer."""
    running = is_running(Path(config.folder))
    return {"silo": config.name, "running": running, "worker": ping(config.socket_path)}


def is_running(folder: Path) -> bool:
    """Return whether the processes of `up` or `join` run, by a party's folder."""
    running = read_json(folder / "running.json")
    return running is not None and bool(process_group(str(running["token"])))


def down(path: Path) -> bool:
    """End the processes of `up` or `join` for a file; returns whether any ran.

    Raises:
        SilotuneError: some processes do not end.
    """
    running = read_json(Path(read_party(path).folder) / "running.json")
    if running is None or not process_group(str(running["token"])):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(running["pid"]), signal.SIGTERM)
    until = time.monotonic() + 30
    while process_group(str(running["token"])) and time.monotonic() < until:
        time.sleep(0.1)
    remaining = end_process_group(str(running["token"]))
    if remaining:
        raise SilotuneError(f"processes that do not end: {', '.join(map(str, remaining))}")
    return True


@contextmanager
def _supervised(folder: Path) -> Iterator[Supervisor]:
    """A supervisor that alone runs in a folder; its token is kept in `running.json`, for `status` and `down`."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    environment = {**ENVIRONMENT, "FLWR_HOME": str(folder / "flwr")}
    with _alone(folder), Supervisor(folder / "logs", environment, timed_logs=True) as supervisor:
        write_text(folder / "running.json", json.dumps({"pid": os.getpid(), "token": supervisor.token}))
        try:
            yield supervisor
        finally:
            (folder / "running.json").unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder for its supervisor, also against one that starts at the same moment."""
    with ExitStack() as lock:
        try:
            lock.enter_context(folder_lock(folder))
        except InputError as error:
            if not is_locked(folder):
                raise
            raise _already_running(folder) from error
        if is_running(folder):
            raise _already_running(folder)
        yield


def _already_running(folder: Path) -> InputError:
    running = read_json(folder / "running.json") or {}
    process = f" (process {running['pid']})" if "pid" in running else ""
    return InputError(f"{folder}: already running{process}; `silotune federation down` ends it")


def _keep_running(supervisor: Supervisor, say: Callable[[str], None], tick: Callable[[], None] = lambda: None) -> None:
    """Restart processes that end, after a delay; never returns. `tick` is called at every check."""
    due: dict[str, float] = {}
    while True:
        tick()
        for child in list(supervisor.children.values()):
            if child.alive:
                continue
            now = time.monotonic()
            if child.name not in due:
                pause = RESTART_DELAYS[min(child.starts, len(RESTART_DELAYS)) - 1]
                due[child.name] = now + pause
                reason = failure_line(child)
                say(f"{child.name} ended with code {child.process.returncode}; again in {pause:g} s ({reason})")
            elif now >= due[child.name]:
                del due[child.name]
                supervisor.restart(child.name)
        time.sleep(CHECK_INTERVAL)


def failure_line(child: ManagedProcess) -> str:
    """Return the log line with Flower's error code if there is one, else the last line."""
    coded = [line for line in child.tail(60).split(" | ") if line.startswith("[code: ")]
    if not coded:
        return child.tail(1)
    refused = "2004" in coded[-1]
    hint = "; its key is not admitted, or the node before it was killed less than a minute ago" if refused else ""
    return coded[-1] + hint
