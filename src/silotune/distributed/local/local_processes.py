"""Runs all parties of a run on this machine: SuperLink, SuperNodes, workers and coordinator, each as a process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from silotune.config import Config
from silotune.core.files import write_text
from silotune.core.yaml_text import dump_yaml
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER, STARTUP_TIMEOUT, RunFollower, RunStatus
from silotune.distributed.flower.commands import (
    flower_environment,
    free_ports,
    listens,
    parse_run_id,
    run_app_command,
    superexec_command,
    superlink_command,
    supernode_command,
    write_app,
    write_home,
)
from silotune.distributed.local.fork_server import ProcessGroup
from silotune.errors import SilotuneError
from silotune.runs.engines.base import Progress

CHECK_INTERVAL = 0.1
"""Seconds between checks of the processes."""

_ISOLATED = ("--insecure", "--isolation", "process")
"""Options with which SuperLink and SuperNodes leave running the apps to `flower-superexec`."""

_CLIENT = ("flwr.supernode.cli", "silotune.distributed.flower.client_app")

_MODELS = tuple(
    f"transformers.{name}" for name in ("modeling_utils", "models.auto.modeling_auto", "models.auto.tokenization_auto")
)

_SERVER = (
    "flwr.superlink.cli",
    "silotune.distributed.coordinator.server_app",
    "silotune.distributed.coordinator.coordinate",
    *_MODELS,
)
"""Modules that are imported once for all ClientApps, backbones and the ServerApp."""


def run_parties(
    config: Config, out: Path, silos: Sequence[str], job: Path, scratch: Path, progress: Progress | None
) -> None:
    """Run all parties of a run until its coordinator has ended.

    Args:
        config: the run's.
        out: the run folder, with all parties' files.
        silos: the silos' names.
        job: the coordinator's.
        scratch: a folder whose path is short.
        progress: called with the coordinator's progress.

    Raises:
        SilotuneError: the run failed, or one of the processes ended.
    """
    if progress is not None:
        progress(1, "starting workers and Flower", 0, len(silos))
    folder, home = out / FEDERATION_FOLDER, scratch / "flwr"
    sockets = {name: scratch / f"{number}.sock" for number, name in enumerate(silos)}
    RunStatus.begin(folder, "submitted")
    with ProcessGroup(folder / "logs", flower_environment(home)) as processes:
        port, *ports = free_ports(1 + len(silos))
        processes.start("superlink", superlink_command("127.0.0.1", port, _ISOLATED))
        for (name, socket), node_port in zip(sockets.items(), ports, strict=True):
            own = {"FLWR_HOME": str(socket.with_suffix(""))}  # apps are unpacked there: one home for each node
            node = supernode_command(f"127.0.0.1:{port}", node_port, name, socket, _ISOLATED)
            processes.start(f"supernode-{name}", node, own)
            processes.start(f"superexec-{name}", superexec_command(node_port), own, _CLIENT)
        for name, socket in sockets.items():  # after Flower, which starts while these import torch
            settings = _silo_config(config, out, name, socket)
            words = [sys.executable, "-m", "silotune.distributed.silo.worker", str(settings)]
            processes.start(f"worker-{name}", words, imports=["silotune.distributed.silo.session", *_MODELS])
        _wait(processes, lambda: listens(port), "the SuperLink does not listen")
        write_home(home, f"127.0.0.1:{port}")
        processes.start("submission", run_app_command(write_app(scratch / "app"), job))
        _wait(processes, lambda: "submission" in processes.ended(), "the SuperLink did not take the run", "submission")
        processes.ended().pop("submission")
        log = folder / "logs" / "submission.log"
        parse_run_id(log.read_text(encoding="utf-8", errors="replace"))
        log.unlink()
        processes.start("superexec", superexec_command(port), imports=_SERVER)
        follower = RunFollower(folder, progress)
        while (status := follower.poll()).state in ("submitted", "working"):
            processes.check()
            time.sleep(CHECK_INTERVAL)
    status.require_finished()


def _wait(processes: ProcessGroup, condition: Callable[[], bool], failure: str, ending: str = "") -> None:
    """Wait for a condition, while all processes run but one that is about to end.

    Raises:
        SilotuneError: a process has ended, or it takes too long.
    """
    until = time.monotonic() + STARTUP_TIMEOUT
    while not condition():
        processes.check(ending)
        if time.monotonic() > until:
            raise SilotuneError(f"{failure} after {STARTUP_TIMEOUT:g} s")
        time.sleep(0.05)


def _silo_config(config: Config, out: Path, name: str, socket: Path) -> Path:
    """Write a silo's settings, and return their file."""
    home = out / "silos" / name
    secret = config.privacy.secret if config.uplink.noise else None
    tree = {
        "name": name,
        "folder": str((out / "checkpoints" / "silos" / name).resolve()),
        "rows": str((home / "rows").resolve()),
        "share": ["validation", "test", "rows", "loss", "seconds"],
        "backbone": config.backbone.model_dump(mode="json"),
        "start": config.start,
        "threads": config.threads,
        "device": config.device,
        "secret": secret,
        "epsilon": "unlimited" if secret else None,
        "seeded_noise": config.privacy.secret is None,
        "policy": "lab",  # whoever starts the run owns all rows
        "approval": "policy",
        "config": str((out / FEDERATION_FOLDER / "silos.yaml").resolve()),
        "socket": str(socket),
    }
    path = home / "silo.yaml"
    write_text(path, dump_yaml(tree))
    return path
