"""Runs a configuration with `--engine flower-local`: every party as a process on this machine.

Each silo's rows are written to a folder of its own, and its worker reads nothing else; private parts stay in the silos'
folders, which are in the run folder.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from silotune.communication.privacy.budget import Privacy
from silotune.config import Config, dump
from silotune.core.files import write_text
from silotune.core.locking import folder_lock
from silotune.data.loading import load_silos
from silotune.data.metrics import LOSS_METRICS
from silotune.data.row_folder import write_rows
from silotune.data.rows import SiloData
from silotune.data.scores import constant_score
from silotune.data.server_rows import draw_labeled_rows
from silotune.data.targets import target_tensor
from silotune.distributed.coordinator.coordinate import PREDECESSOR_TIMEOUT
from silotune.distributed.coordinator.job import Job
from silotune.distributed.coordinator.run_registry import RunRegistry
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER
from silotune.distributed.flower.commands import require_flower
from silotune.distributed.local.local_processes import run_parties
from silotune.distributed.protocol.agreement import check_federated, wire_config
from silotune.errors import OR_RESUME, InputError, require_unused
from silotune.evaluation.baselines import baselines
from silotune.methods import Method
from silotune.methods.parts import Scope, names_with
from silotune.runs.build.coordinator import privacy_guarantee, sampling_groups
from silotune.runs.build.resolve import make_method, on_this_machine, with_chat_template, with_threads_for
from silotune.runs.build.validation import check_tasks
from silotune.runs.engines.base import Progress
from silotune.runs.storage.readers import read_summary
from silotune.runs.storage.run_folder import RunFolder, continued
from silotune.runs.storage.scored_rows import collect_test_scores
from silotune.runs.summary import intervals


def run_local(
    config: Config,
    out: Path,
    resume: bool = False,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> tuple[dict[str, Any], Privacy | None]:
    """Run a configuration with `--engine flower-local`.

    Args:
        config: the run's configuration.
        out: the run folder; must be new or empty unless `resume`.
        resume: continue an interrupted run.
        progress: called with the coordinator's progress.
        announce: called with each line of the privacy guarantee before the run starts.

    Returns:
        The summary, and the privacy guarantee if there is one.

    Raises:
        SilotuneError: the run could not be finished; finished rounds are in the run folder.
    """
    require_flower()
    if not resume:
        require_unused(out, "--out", OR_RESUME)
    check_federated(config)
    data = load_silos(config)
    config = on_this_machine(with_threads_for(continued(config, out) if resume else config, len(data)))
    config = with_chat_template(config, data)
    method = make_method(config)
    tasks = {silo.name: silo.task for silo in data}
    check_tasks(config, method, tasks)
    names = [silo.name for silo in data]
    if len(set(map(str.lower, names))) < len(names):
        raise InputError("silos: names that differ in case only cannot be folders everywhere")
    privacy = None
    if names_with(method.parts(), Scope.SHARED):
        privacy = privacy_guarantee(config, sorted(names), sampling_groups(config, tasks), bool(method.server_phases()))
    if privacy is not None:
        privacy.require_a_round()
    RunFolder.check(out, dump(config), resume)
    RunRegistry.check(out)
    with folder_lock(out):
        # waits until the coordinator of a killed earlier run, which ends by itself, has released the folder
        with folder_lock(out / FEDERATION_FOLDER, PREDECESSOR_TIMEOUT):
            job = _prepare(config, out, method, data)
        if privacy is not None and announce is not None:
            for line in privacy.lines():
                announce(line)
        with tempfile.TemporaryDirectory(prefix="silotune-") as scratch:  # sockets need short paths
            run_parties(config, out, names, job, Path(scratch), progress)
        return _finished(out, config, data), privacy


def _prepare(config: Config, out: Path, method: Method, data: list[SiloData]) -> Path:
    """Write every party's files; returns the path of the coordinator's job."""
    folder, names = out / FEDERATION_FOLDER, [silo.name for silo in data]
    labeled = None
    if method.server_phases():
        labeled = folder / "labeled"
        write_rows(labeled, draw_labeled_rows(data, config.server, config.data_seed))
    write_text(folder / "config.yaml", dump(config))
    write_text(folder / "silos.yaml", wire_config(config, names))
    for silo in data:
        write_rows(out / "silos" / silo.name / "rows", silo)
    job = Job(
        str(folder / "config.yaml"),
        str(out),
        tuple(names),
        labelled=None if labeled is None else str(labeled),
        local=True,
    )
    job.write(folder / "job.json")
    return folder / "job.json"


def _finished(out: Path, config: Config, data: list[SiloData]) -> dict[str, Any]:
    """Complete a finished run folder and return its summary.

    Adds the majority score on central test rows, the baselines and the intervals to the summary, and copies what only
    silos have to where a run in one process has it: the scores' details and the predictions.
    """
    summary, names = read_summary(out), [silo.name for silo in data]
    if config.partition.name != "none" and summary["global"]:
        test, task = data[0].splits.test, data[0].task
        if task.labeled and task.metric not in LOSS_METRICS and test:
            summary["global"]["majority"] = constant_score(task, target_tensor(task, test))
    scores = collect_test_scores(out, [_silo_folder(out, name) for name in names])
    summary["intervals"] = intervals(scores)
    if config.evaluation.baselines:
        summary["baselines"] = baselines(data, config.partition.name != "none")
    write_text(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


def _silo_folder(out: Path, name: str) -> Path:
    """Return the folder in which a silo on this machine keeps what it has of this run."""
    return out / "checkpoints" / "silos" / name / RunRegistry.open(out).run
