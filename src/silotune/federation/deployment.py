"""A federation on several machines: what `silotune federation up, admit, start, join, status, down` do.

`up` and `join` stay in the foreground and look after their processes, as systemd and containers want it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from silotune.config.parse import input_error
from silotune.config.section import Section
from silotune.config.trees import parse_tree
from silotune.errors import InputError, SilotuneError
from silotune.federation.flower import ENVIRONMENT, require_flower, submit, superlink, supernode, write_app, write_home
from silotune.federation.local import LocalConfig, read_local
from silotune.federation.supervision import Household, lives, wait_for_port
from silotune.federation.watchdog import end, family
from silotune.federation.worker import ping
from silotune.runs import write_text

LOOK = 0.5
PAUSES = (1.0, 5.0, 15.0, 30.0)
"""Seconds before a process that ended is started again, the last for all further times: a node that was killed is not
let in for up to a minute."""
SLOW = 180.0


class LinkConfig(Section):
    """The coordinator's side of the wire.

    `folder`: SuperLink's state and logs. `host` and `port`: where it listens; leave it on loopback and put a proxy that
    lets only `/v1/fleet/` and `/health` through before it: who reaches the rest can run code on the silos. `ca`,
    `certificate`, `key`: TLS; nodes must then be admitted by their keys. `insecure`: neither, for one machine.
    """

    folder: str = Field(min_length=1)
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    ca: str | None = Field(None, min_length=1)
    certificate: str | None = Field(None, min_length=1)
    key: str | None = Field(None, min_length=1)
    insecure: bool = False

    @model_validator(mode="after")
    def _fitting(self) -> LinkConfig:
        files = (self.ca, self.certificate, self.key)
        if self.insecure and any(files):
            raise ValueError("insecure: excludes ca, certificate and key")
        if not self.insecure and not all(files):
            raise ValueError("give ca, certificate and key (or insecure: true, for one machine)")
        return self


def read_link(path: Path) -> LinkConfig:
    """A coordinator's file; paths are relative to it.

    Raises:
        InputError: naming the key and what is allowed.
    """
    try:
        tree = parse_tree(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"coordinator config {path}: cannot be read ({error})") from error
    here = path.resolve().parent
    for key in ("folder", "ca", "certificate", "key"):
        if isinstance(tree.get(key), str) and tree[key]:
            tree[key] = str((here / Path(tree[key]).expanduser()).resolve())
    try:
        return LinkConfig.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"coordinator config {path}: {input_error(error, LinkConfig)}") from None


def up(config: LinkConfig, say: Callable[[str], None]) -> None:
    """Run the SuperLink until told to end."""
    require_flower()
    folder = Path(config.folder)
    with _running(folder) as household:
        secured = ["--insecure"]
        if not config.insecure:
            secured = ["--ssl-ca-certfile", str(config.ca), "--ssl-certfile", str(config.certificate)]
            secured += ["--ssl-keyfile", str(config.key), "--enable-supernode-auth"]
        secured += ["--database", str(folder / "superlink.db")]
        link = household.start("superlink", superlink(config.host, config.port, secured))
        wait_for_port(link, config.port, SLOW)
        say(f"SuperLink on {config.host}:{config.port}; logs: {folder / 'logs'}")
        _look_after(household, say)


def admit(config: LinkConfig, silo: str, key: Path) -> str:
    """Register a silo's public key; the node's id.

    Raises:
        SilotuneError: it was not taken.
    """
    words = ["flwr", "supernode", "register", str(key), "silotune", "--name", f"silo-{silo}", "--format", "json"]
    done = subprocess.run(words, env=_flower(config), capture_output=True, text=True, timeout=300, check=False)
    try:
        found = json.loads(done.stdout)
        if done.returncode == 0 and found.get("success", True):
            return str(found["node-id"])
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise SilotuneError(f"silo {silo!r} was not admitted: {' '.join(f'{done.stdout} {done.stderr}'.split())[-300:]}")


def start(config: LinkConfig, job: Path) -> str:
    """Hand a job (`coordinate.Job`) to the SuperLink; the run's id."""
    require_flower()
    environment = _flower(config)
    return submit(write_app(Path(config.folder) / "app"), job, environment)


def follow(out: Path, progress: Callable[[int, str, int, int], None]) -> None:
    """Wait until a run's coordinator says how it ended.

    Raises:
        SilotuneError: it failed, or is gone.
    """
    place, said = out / "federation", ""
    while (outcome := _read(place / "outcome.json")) is None:
        with contextlib.suppress(OSError, ValueError):
            text = (place / "progress.json").read_text(encoding="utf-8")
            if text != said:
                said = text
                progress(*json.loads(text))
        begun = _read(place / "coordinator.json")
        if begun is not None and not lives(int(begun["pid"])) and not (place / "outcome.json").exists():
            raise SilotuneError(
                "the coordinator's process is gone; what is finished is kept (start again with --resume)"
            )
        time.sleep(LOOK)
    if outcome["state"] != "finished":
        raise (InputError if outcome.get("exit_code") == 2 else SilotuneError)(str(outcome.get("error")))


def join(path: Path, local: LocalConfig, say: Callable[[str], None]) -> None:
    """Run a silo's worker and SuperNode until told to end."""
    require_flower()
    if local.superlink is None:
        raise InputError(f"silo config {path}: superlink: give the address HOST:PORT")
    if not local.insecure and not (local.root_certificates and local.private_key):
        raise InputError(
            f"silo config {path}: give root_certificates and private_key (or insecure: true, for one machine)"
        )
    with _running(Path(local.folder)) as household:
        secured = ["--insecure"]
        if not local.insecure:
            secured = ["--root-certificates", str(local.root_certificates)]
            secured += ["--auth-supernode-private-key", str(local.private_key)]
        household.start("worker", [sys.executable, "-m", "silotune", "worker", str(path.resolve())])
        words = supernode(local.superlink, local.port, local.name, local.socket_path, secured)
        household.start("supernode", words)
        say(f"silo {local.name!r} joins {local.superlink}; logs: {Path(local.folder) / 'logs'}")
        _look_after(household, say)


def status(path: Path) -> list[str]:
    """What runs of a coordinator's or a silo's file, line by line."""
    kind, config = _either(path)
    folder = Path(config.folder)
    running = _read(folder / "running.json")
    there = running is not None and bool(family(str(running["token"])))
    lines = [f"{kind}: {'running' if there else 'not running'}"]
    if isinstance(config, LocalConfig):
        said = ping(config.socket_path)
        lines.append("worker: " + ("no answer" if said is None else str(said.get("busy") or "ready")))
    elif there:
        words = ["flwr", "supernode", "list", "silotune", "--format", "json"]
        done = subprocess.run(words, env=_flower(config), capture_output=True, text=True, timeout=300, check=False)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            for node in json.loads(done.stdout)["nodes"]:
                lines.append(f"node {node.get('name') or node.get('node-id')}: {node.get('status')}")
    return lines


def down(path: Path) -> bool:
    """End what `up` or `join` runs for a file; whether anything ran."""
    _, config = _either(path)
    running = _read(Path(config.folder) / "running.json")
    if running is None or not family(str(running["token"])):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(running["pid"]), signal.SIGTERM)
    until = time.monotonic() + 30
    while family(str(running["token"])) and time.monotonic() < until:
        time.sleep(0.1)
    left = end(str(running["token"]))
    if left:
        raise SilotuneError(f"processes that do not end: {', '.join(map(str, left))}")
    return True


def _either(path: Path) -> tuple[str, LinkConfig | LocalConfig]:
    try:
        tree = parse_tree(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"config {path}: cannot be read ({error})") from error
    return (f"silo {tree['name']!r}", read_local(path)) if "name" in tree else ("coordinator", read_link(path))


@contextmanager
def _running(folder: Path) -> Iterator[Household]:
    """A household that `status` and `down` find again."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    before = _read(folder / "running.json")
    if before is not None and family(str(before["token"])):
        raise InputError(f"{folder}: already running (process {before['pid']}); `silotune federation down` ends it")
    environment = {**ENVIRONMENT, "FLWR_HOME": str(folder / "flwr")}
    with Household(folder / "logs", environment) as household:
        write_text(folder / "running.json", json.dumps({"pid": os.getpid(), "token": household.token}))
        try:
            yield household
        finally:
            (folder / "running.json").unlink(missing_ok=True)


def _look_after(household: Household, say: Callable[[str], None]) -> None:
    due: dict[str, float] = {}
    while True:
        for child in list(household.children.values()):
            if child.alive:
                continue
            now = time.monotonic()
            if child.name not in due:
                pause = PAUSES[min(child.starts, len(PAUSES)) - 1]
                due[child.name] = now + pause
                say(f"{child.name} ended with code {child.process.returncode}; again in {pause:g} s ({child.tail(1)})")
            elif now >= due[child.name]:
                del due[child.name]
                household.again(child.name)
        time.sleep(LOOK)


def _flower(config: LinkConfig) -> dict[str, str]:
    home = write_home(Path(config.folder) / "flwr", f"{config.host}:{config.port}", config.ca)
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    return {**os.environ, **ENVIRONMENT, "PATH": path, "FLWR_HOME": str(home)}


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return None
