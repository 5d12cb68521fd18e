"""Command lines of Flower 1.42's processes and the files they read; runs `flwr` and parses its output."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from silotune.errors import InputError, SilotuneError

ENVIRONMENT: Mapping[str, str] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}
"""Environment of all Flower processes: no telemetry."""

SELDOM: Mapping[str, str] = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "10"}
"""Unless the environment says else, executors ask seldom for work; a SuperNode rings for its own (`quick.py`)."""

PATIENCE = 300.0
"""Seconds for one of Flower's commands."""


_APP = """[project]
name = "silotune-federation"
version = "1.0.0"
description = "A silotune run"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "silotune"

[tool.flwr.app.components]
serverapp = "silotune.distributed.coordinator.server_app:app"
clientapp = "silotune.distributed.flower.client_app:app"

[tool.flwr.app.config]
job = ""
"""


def require_flower() -> None:
    """Check that Flower is installed."""
    if find_spec("flwr") is None:
        raise InputError("federation: needs Flower; install silotune[federation]")


def free_ports(count: int) -> list[int]:
    """Return ports on 127.0.0.1 that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def listens(port: int) -> bool:
    """Return whether a process listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def write_app(folder: Path) -> Path:
    """Write the app for the SuperLink: it names modules only; code comes from the installed package."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(_APP, encoding="utf-8")
    return folder


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes, which find each other's commands beside this Python.

    Connections on this machine go through no proxy.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    direct = ",".join([*([hosts] if hosts else []), "127.0.0.1", "localhost", "::1"])
    proxies = {"no_proxy": direct, "NO_PROXY": direct}
    return {**SELDOM, **os.environ, **ENVIRONMENT, **proxies, "PATH": path, "FLWR_HOME": str(home)}


def write_home(folder: Path, address: str, certificates: str | None = None) -> Path:
    """Write Flower's home folder with the address of the SuperLink that `flwr` connects to."""
    folder.mkdir(parents=True, exist_ok=True)
    secure = "insecure = true" if certificates is None else f"root-certificates = {json.dumps(certificates)}"
    text = f'[superlink]\ndefault = "silotune"\n\n[superlink.silotune]\naddress = "{address}"\n{secure}\n'
    (folder / "config.toml").write_text(text, encoding="utf-8")
    return folder


def superlink_command(host: str, port: int, options: Sequence[str] = ("--insecure",)) -> list[str]:
    """Return the command line of a SuperLink."""
    words = ["flower-superlink", *options, "--host", host, "--port", str(port)]
    return [*words, "--disable-runtime-dependency-installation"]


def supernode_command(
    address: str, port: int, silo: str, worker: Path, options: Sequence[str] = ("--insecure",)
) -> list[str]:
    """Return the command line of a SuperNode."""
    config = f'silo="{silo}" worker="{worker}"'
    words = ["flower-supernode", *options, "--superlink", address, "--host", "127.0.0.1", "--port", str(port)]
    return [*words, "--node-config", config]


def superexec_command(port: int) -> list[str]:
    """Return the command line of a process that runs apps for a SuperLink or SuperNode."""
    return ["flower-superexec", "--insecure", "--runtime-api-address", f"127.0.0.1:{port}"]


def run_app_command(app: Path, job: Path) -> list[str]:
    """Return the command line that submits a job to the SuperLink."""
    return ["flwr", "run", str(app), "silotune", "--format", "json", "-c", f"job={json.dumps(str(job))}"]


def submit_job(app: Path, job: Path, environment: Mapping[str, str]) -> str:
    """Submit a job to the SuperLink, and return Flower's id of the run."""
    process = run_flwr(run_app_command(app, job), environment, "flwr run")
    return parse_run_id(f"{process.stdout} {process.stderr}")


def run_flwr(command: Sequence[str], environment: Mapping[str, str], failure: str) -> subprocess.CompletedProcess[str]:
    """Run one of Flower's commands. With `--format json` its exit code is 0 even if it failed."""
    try:
        return subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SilotuneError(f"{failure}: the SuperLink did not answer within {PATIENCE:g} s") from error


def parse_run_id(output: str) -> str:
    """Return the run's id from the output of `flwr run`."""
    try:
        return str(json.loads(output[output.index("{") : output.rindex("}") + 1])["run-id"])
    except (ValueError, KeyError, TypeError) as error:
        text = " ".join(output.split())[-300:]
        raise SilotuneError(f"flwr run: the SuperLink did not take the run ({text})") from error
