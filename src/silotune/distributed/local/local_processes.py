"""`LocalProcesses` (`--engine flower-local`): starts, restarts Flower's processes, workers with their `silo.yaml`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from silotune.config import Config
from silotune.core.files import write_text
from silotune.core.yaml_text import dump_yaml
from silotune.distributed.coordinator.run_registry import FEDERATION_FOLDER
from silotune.distributed.coordinator.status_files import STARTUP_TIMEOUT, CoordinatorMonitor, clear, require_finished
from silotune.distributed.flower.commands import (
    parse_run_id,
    run_app_command,
    superexec_command,
    superlink_command,
    supernode_command,
    write_app,
    write_home,
)
from silotune.distributed.processes.ports import free_ports, wait_for_port
from silotune.distributed.processes.restart_policy import RestartPolicy
from silotune.distributed.processes.supervisor import Supervisor
from silotune.errors import SilotuneError
from silotune.runs.engines.base import Progress

CHECK_INTERVAL = 0.1
"""Seconds between checks of the processes."""

STARTS = 6
"""Ends of one process without a finished round in between at which the run stops."""


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
"""Modules that the fork server imports for ClientApps, backbones and the ServerApp."""

_FLOWER = "Flower"
"""Name of Flower's processes as a whole in the `RestartPolicy`."""


class LocalProcesses:
    """Starts the processes of one run and restarts those that die.

    Args:
        config: the run's.
        out: the run folder, with all parties' files.
        silos: the silos' names.
        job: the coordinator's.
        scratch: a folder whose path is short.
        supervisor: runs the processes.
        progress: called with the coordinator's progress.
    """

    def __init__(
        self,
        config: Config,
        out: Path,
        silos: Sequence[str],
        job: Path,
        scratch: Path,
        supervisor: Supervisor,
        progress: Progress | None,
    ) -> None:
        self._config = config
        self._out = out
        self._names = silos
        self._job = job
        self._scratch = scratch
        self._supervisor = supervisor
        self._progress = progress or (lambda *_: None)
        self._restarts = RestartPolicy(STARTS, self._finished_rounds)
        self._coordinator = CoordinatorMonitor(out / FEDERATION_FOLDER, self._progress)

    def run(self) -> None:
        """Run until the coordinator's outcome.

        Raises:
            SilotuneError: it failed, or a process ended too often.
        """
        self._progress(1, "starting workers and Flower", 0, len(self._names))
        configs = [self._silo_config(number, name) for number, name in enumerate(self._names)]
        self._start_flower()  # first: it starts while the workers import torch
        for name, path in zip(self._names, configs, strict=True):
            words = [sys.executable, "-m", "silotune.distributed.silo.worker", str(path)]
            self._supervisor.start(f"worker-{name}", words, imports=["silotune.distributed.silo.session", *_MODELS])
        while True:
            outcome = self._coordinator.outcome()
            if outcome is not None and not self._resumed_after_loss(outcome):
                break
            self._keep_running()
            self._coordinator.poll()
            time.sleep(CHECK_INTERVAL)
        require_finished(outcome)

    def _silo_config(self, number: int, name: str) -> Path:
        home = self._out / "silos" / name
        secret = self._config.privacy.secret if self._config.uplink.noise else None
        tree = {
            "name": name,
            "folder": str((self._out / "checkpoints" / "silos" / name).resolve()),
            "rows": str((home / "rows").resolve()),
            "share": ["validation", "test", "rows", "loss", "seconds"],
            "backbone": self._config.backbone.model_dump(mode="json"),
            "start": self._config.start,
            "threads": self._config.threads,
            "device": self._config.device,
            "secret": secret,
            "epsilon": "unlimited" if secret else None,
            "seeded_noise": self._config.privacy.secret is None,
            "policy": "lab",  # whoever starts the run owns all rows
            "approval": "policy",
            "config": str((self._out / FEDERATION_FOLDER / "silos.yaml").resolve()),
            "socket": str(self._socket(number)),
        }
        path = home / "silo.yaml"
        write_text(path, dump_yaml(tree))
        return path

    def _socket(self, number: int) -> Path:
        return self._scratch / f"{number}.sock"

    def _finished_rounds(self) -> list[str]:
        return sorted(path.name for path in (self._out / "checkpoints").glob("round-*.json"))

    def _start_flower(self) -> None:
        """Start Flower's processes and submit the job; retried if the SuperLink ends."""
        while True:
            try:
                self._start_once()
                return
            except SilotuneError:  # the SuperLink ended, or another process took its port
                link = self._supervisor.children.get("superlink")
                if link is None or link.alive or not self._restarts.may_restart(_FLOWER):
                    raise

    def _replace_flower(self) -> None:
        """Replace all of Flower's processes; the run resumes."""
        if not self._restarts.may_restart(_FLOWER):
            logs = self._out / FEDERATION_FOLDER / "logs"
            raise SilotuneError(
                f"Flower's processes ended {STARTS} times without a finished round between (see {logs})"
            )
        self._start_flower()

    def _start_once(self) -> None:
        folder = self._out / FEDERATION_FOLDER
        start, children = self._supervisor.start, self._supervisor.children
        flower = [name for name in children if not name.startswith("worker-")]
        if flower:
            self._supervisor.end(*flower, grace=1.0)  # finished rounds are on disk
        clear(folder)
        port, *ports = free_ports(1 + len(self._names))
        link = start("superlink", superlink_command("127.0.0.1", port, _ISOLATED))
        for number, (name, node_port) in enumerate(zip(self._names, ports, strict=True)):
            home = {"FLWR_HOME": str(self._scratch / str(number))}  # apps are unpacked there: one home for each node
            start(
                f"supernode-{name}",
                supernode_command(f"127.0.0.1:{port}", node_port, name, self._socket(number), _ISOLATED),
                home,
            )
            start(f"superexec-{name}", superexec_command(node_port), home, _CLIENT)
        wait_for_port(link, port, STARTUP_TIMEOUT)
        self._submit(port)
        start("superexec", superexec_command(port), imports=_SERVER)
        self._coordinator = CoordinatorMonitor(folder, self._progress)

    def _submit(self, port: int) -> None:
        write_home(Path(self._supervisor.environment["FLWR_HOME"]), f"127.0.0.1:{port}")
        words = run_app_command(write_app(self._scratch / "app"), self._job)
        child = self._supervisor.start("submission", words)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=STARTUP_TIMEOUT)
        self._supervisor.end("submission")
        parse_run_id(child.log.read_text(encoding="utf-8", errors="replace"))
        child.log.unlink()

    def _resumed_after_loss(self, outcome: dict[str, Any]) -> bool:
        """Return whether the run ended because Flower failed; then Flower is restarted and the run resumed."""
        if outcome["state"] != "lost" or not self._restarts.may_restart(_FLOWER):
            return False
        self._start_flower()
        return True

    def _keep_running(self) -> None:
        children = self._supervisor.children
        if not children["superlink"].alive or self._coordinator.failure_reason():
            self._replace_flower()
            return
        for child in [child for child in children.values() if not child.alive]:
            if not self._restarts.may_restart(child.name):
                raise SilotuneError(
                    f"{child.name} ended {STARTS} times without a finished round between: {child.tail()}"
                )
            self._supervisor.restart(child.name)
