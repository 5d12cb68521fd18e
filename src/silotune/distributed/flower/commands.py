"""Flower's commands, as version 1.41 wants them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from silotune.errors import InputError, SilotuneError

ENVIRONMENT: Mapping[str, str] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
}
"""What all of Flower's processes see: nothing is sent home, and new messages are looked for often."""

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
    """Refuse where Flower is not installed.

    Raises:
        InputError: with what to install.
    """
    if find_spec("flwr") is None:
        raise InputError("federation: needs Flower; install silotune[federation]")


def write_app(folder: Path) -> Path:
    """The app that is sent to the SuperLink: only the names of modules; code comes from the installed package."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(_APP, encoding="utf-8")
    return folder


def write_home(folder: Path, address: str, certificates: str | None = None) -> Path:
    """Flower's own folder, with the SuperLink that `flwr` talks to."""
    folder.mkdir(parents=True, exist_ok=True)
    secure = "insecure = true" if certificates is None else f"root-certificates = {json.dumps(certificates)}"
    text = f'[superlink]\ndefault = "silotune"\n\n[superlink.silotune]\naddress = "{address}"\n{secure}\n'
    (folder / "config.toml").write_text(text, encoding="utf-8")
    return folder


def superlink(host: str, port: int, more: Sequence[str] = ("--insecure",)) -> list[str]:
    """The SuperLink's command."""
    return [
        "flower-superlink",
        *more,
        "--host",
        host,
        "--port",
        str(port),
        "--disable-runtime-dependency-installation",
    ]


def supernode_command(
    address: str, port: int, silo: str, worker: Path, more: Sequence[str] = ("--insecure",)
) -> list[str]:
    """A SuperNode's command."""
    config = f'silo="{silo}" worker="{worker}"'
    return [
        "flower-supernode",
        *more,
        "--superlink",
        address,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--node-config",
        config,
    ]


def superexec_command(port: int) -> list[str]:
    """The command that runs the apps of a SuperLink or SuperNode on this machine, where that does not do so itself."""
    return ["flower-superexec", "--insecure", "--runtime-api-address", f"127.0.0.1:{port}"]


def run_app_command(app: Path, job: Path) -> list[str]:
    """The command that hands a job to the SuperLink."""
    return ["flwr", "run", str(app), "silotune", "--format", "json", "-c", f"job={json.dumps(str(job))}"]


def submit_job(app: Path, job: Path, environment: Mapping[str, str]) -> str:
    """Hand a job to the SuperLink; the run's id.

    Raises:
        SilotuneError: it was not taken, or nobody answered.
    """
    done = run_flwr(run_app_command(app, job), environment, "flwr run")
    return parse_run_id(f"{done.stdout} {done.stderr}")


def run_flwr(words: Sequence[str], environment: Mapping[str, str], failure: str) -> subprocess.CompletedProcess[str]:
    """One of Flower's commands to the SuperLink; with JSON wanted its exit code is 0 even where it failed.

    Args:
        words: the command.
        environment: all that it sees.
        failure: what a complaint begins with.

    Raises:
        SilotuneError: the SuperLink did not answer.
    """
    try:
        return subprocess.run(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SilotuneError(f"{failure}: the SuperLink did not answer within {PATIENCE:g} s") from error


def parse_run_id(said: str) -> str:
    """The run's id in what `flwr run` said.

    Raises:
        SilotuneError: it was not taken.
    """
    try:
        return str(json.loads(said[said.index("{") : said.rindex("}") + 1])["run-id"])
    except (ValueError, KeyError, TypeError) as error:
        text = " ".join(said.split())[-300:]
        raise SilotuneError(f"flwr run: the SuperLink did not take the run ({text})") from error
