"""Runs a configuration with `--engine flower-local`: every party as a process on this machine.

Each silo's rows are written to a folder of its own, and its worker reads nothing else; private parts stay in the silos'
folders, which are in the run folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from silotune.communication.masks.fixed_point import require_masks
from silotune.communication.privacy.accountant import Privacy
from silotune.config import Config, dump
from silotune.core.files import dump_yaml, folder_lock, write_text
from silotune.core.surroundings import require_posix, require_short_tmpdir
from silotune.data.loading import draw_labeled_rows, load_silos, own_labeled_rows
from silotune.data.row_folder import write_rows
from silotune.data.rows import SiloData
from silotune.data.scores import constant_score
from silotune.data.targets import target_tensor
from silotune.data.tasks import LOSS_METRICS
from silotune.distributed.coordinator.coordinate import PREDECESSOR_TIMEOUT
from silotune.distributed.coordinator.job import CoordinatorJob, RunRegistry
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER, STARTUP_TIMEOUT, RunFollower, RunStatus
from silotune.distributed.flower.commands import (
    flower_environment,
    free_ports,
    listens,
    parse_run_id,
    require_flower,
    run_app_command,
    superexec_command,
    superlink_command,
    supernode_command,
    write_app,
    write_home,
)
from silotune.distributed.flower.quick import CLIENT
from silotune.distributed.local.fork_server import ProcessGroup
from silotune.distributed.protocol.handshake import check_federated, wire_config
from silotune.distributed.silo.silo_config import REHEARSAL
from silotune.errors import OR_RESUME, InputError, SilotuneError, require_unused
from silotune.evaluation.baselines import baselines, joined
from silotune.evaluation.untouched import untouched_baselines
from silotune.methods import Method
from silotune.methods.parts import Scope, names_with
from silotune.runs.build.coordinator import privacy_guarantee, sampling_groups
from silotune.runs.build.model import build_model
from silotune.runs.build.resolve import SUMS_ALONE, resolve, with_chat_template
from silotune.runs.build.validation import check_tasks
from silotune.runs.engines.base import Progress
from silotune.runs.storage.readers import read_summary
from silotune.runs.storage.run_folder import RunFolder, continued
from silotune.runs.storage.scored_rows import collect_test_scores
from silotune.runs.summary import intervals

CHECK_INTERVAL = 0.1
"""Seconds between checks of the processes."""

_ISOLATED = ("--insecure", "--isolation", "process")
"""Options with which SuperLink and SuperNodes leave running the apps to `flower-superexec`."""

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


def run_local(
    config: Config,
    out: Path,
    resume: bool = False,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> tuple[dict[str, Any], Privacy | None]:
    """Run a configuration with `--engine flower-local`; returns summary and privacy guarantee, if there is one."""
    require_posix("--engine flower-local")
    require_flower()
    require_short_tmpdir()
    if not resume:
        require_unused(out, "--out", OR_RESUME)
    check_federated(config)
    data = load_silos(config)
    config = with_chat_template(continued(config, out) if resume else config, data)
    config, method = resolve(config, processes=len(data))
    tasks = {silo.name: silo.task for silo in data}
    check_tasks(config, method, tasks)
    if config.aggregation.secure:
        require_masks(len(data))
        if announce is not None:
            announce(SUMS_ALONE)
    names = [silo.name for silo in data]
    if len(set(map(str.lower, names))) < len(names):
        raise InputError("silos: names that differ in case only cannot be folders everywhere")
    privacy = None
    if names_with(method.parts(), Scope.SHARED):
        privacy = privacy_guarantee(config, sorted(names), sampling_groups(config, tasks), bool(method.server_phases()))
    if privacy is not None:
        privacy.require_a_round()
    RunFolder.check(out, dump(config), resume)
    RunRegistry.open(out)
    with folder_lock(out):
        # waits until the coordinator of a killed earlier run, which ends by itself, has released the folder
        with folder_lock(out / FEDERATION_FOLDER, PREDECESSOR_TIMEOUT):
            job = _prepare(config, out, method, data)
        if privacy is not None and announce is not None:
            for line in privacy.lines():
                announce(line)
        with tempfile.TemporaryDirectory(prefix="silotune-") as scratch:  # sockets need short paths
            _run_parties(config, out, names, job, Path(scratch), progress)
        return _finished(out, config, data, method), privacy


def _prepare(config: Config, out: Path, method: Method, data: list[SiloData]) -> Path:
    """Write every party's files; returns the path of the coordinator's job."""
    folder, names = out / FEDERATION_FOLDER, [silo.name for silo in data]
    labeled = None
    if method.server_phases():
        labeled = folder / "labeled"
        own = own_labeled_rows(config)
        write_rows(labeled, own or draw_labeled_rows(data, config.server, config.data_seed))
    write_text(folder / "config.yaml", dump(config))
    write_text(folder / "silos.yaml", wire_config(config, names))
    for silo in data:
        write_rows(out / "silos" / silo.name / "rows", silo, config.privacy.unit is not None)
    job = CoordinatorJob(
        str(folder / "config.yaml"),
        str(out),
        tuple(names),
        labelled=None if labeled is None else str(labeled),
        local=True,
    )
    job.write(folder / "job.json")
    return folder / "job.json"


def _finished(out: Path, config: Config, data: list[SiloData], method: Method) -> dict[str, Any]:
    """Complete a finished run folder and return its summary.

    Adds the majority score on central test rows, the baselines and the intervals to the summary, and copies what only
    silos have to where a run in one process has it: the scores' details and the predictions.
    """
    summary, names = read_summary(out), [silo.name for silo in data]
    if config.partition.judges_alike and summary["global"]:
        test, task = data[0].splits.test, data[0].task
        if task.labeled and task.metric not in LOSS_METRICS and test:
            summary["global"]["majority"] = constant_score(task, target_tensor(task, test))
    folder, run = out / "checkpoints" / "silos", RunRegistry.open(out).run
    scores = collect_test_scores(out, [folder / name / run for name in names])
    summary["intervals"] = intervals(scores)
    if config.evaluation.baselines:
        central = config.partition.judges_alike
        summary["baselines"] = baselines(data, central)
        if not method.setting.head.has_tensors:
            context = build_model(config, method, [silo.task for silo in data])
            alone = untouched_baselines(context, data, config.evaluation.shots, central)
            summary["baselines"] = joined(summary["baselines"], alone)
    write_text(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


# -- processes ---------------------------------------------------------------------------------------------------------


def _run_parties(
    config: Config, out: Path, silos: Sequence[str], job: Path, scratch: Path, progress: Progress | None
) -> None:
    """Run SuperLink, SuperNodes, workers and coordinator until the coordinator has ended."""
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
            processes.start(f"superexec-{name}", superexec_command(node_port), own, CLIENT)
        masked = _masked(out, silos) if config.aggregation.secure else {}
        for name, socket in sockets.items():  # after Flower, which starts while these import torch
            settings = _silo_config(config, out, name, socket, masked.get(name))
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
        if status.state == "lost":
            processes.check()  # names the process that took the coordinator with it
    status.require_finished()


def _wait(processes: ProcessGroup, condition: Callable[[], bool], failure: str, ending: str = "") -> None:
    """Wait for a condition while all processes run, except one that is about to end."""
    until = time.monotonic() + STARTUP_TIMEOUT
    while not condition():
        processes.check(ending)
        if time.monotonic() > until:
            raise SilotuneError(f"{failure} after {STARTUP_TIMEOUT:g} s")
        time.sleep(0.05)


def _masked(out: Path, silos: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return whom each silo sums with under masks; here nobody needs to compare the list."""
    from silotune.distributed.silo.mask_work import made_identity

    files = {name: (out / "silos" / name / "identity.key").resolve() for name in silos}
    peers = {name: made_identity(file) for name, file in files.items()}
    return {name: {"identity": str(file), "peers": peers} for name, file in files.items()}


def _silo_config(config: Config, out: Path, name: str, socket: Path, masked: dict[str, Any] | None) -> Path:
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
        "masked": masked,
        "policy": dict(REHEARSAL),  # whoever starts the run owns all rows
        "approval": "policy",
        "config": str((out / FEDERATION_FOLDER / "silos.yaml").resolve()),
        "socket": str(socket),
    }
    path = home / "silo.yaml"
    write_text(path, dump_yaml(tree))
    return path
