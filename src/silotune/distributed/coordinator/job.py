"""Describes a coordinator's job, and prepares its run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from silotune.config import Config, dump
from silotune.config.data import PartitionConfig
from silotune.core.files import write_text
from silotune.core.locking import folder_lock
from silotune.distributed.coordinator.run_registry import RunRegistry
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER, RunStatus
from silotune.distributed.protocol.agreement import check_federated
from silotune.errors import OR_RESUME, InputError, require_unused
from silotune.runs.build.resolve import on_this_machine
from silotune.runs.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Job:
    """A coordinator's job.

    Args:
        config: path of the run's configuration.
        out: the run folder.
        silos: the silos' names; if empty, those of `federation.silos`.
        labelled: the folder of the coordinator's labeled rows.
        local: whether all silos' folders are in the run folder.
        cells: of a plan, the names of its runs, each in a folder of `out`, with its own configuration.
    """

    config: str
    out: str
    silos: tuple[str, ...] = ()
    labelled: str | None = None
    local: bool = False
    cells: tuple[str, ...] = ()

    def cell(self, name: str) -> Job:
        """Return the job of one of a plan's runs."""
        out = Path(self.out) / name
        return Job(str(out / FEDERATION_FOLDER / "config.yaml"), str(out), self.silos, self.labelled)

    @classmethod
    def read(cls, path: str | Path) -> Job:
        """Read a job from a JSON file."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**(fields | {name: tuple(fields.get(name, ())) for name in ("silos", "cells")}))

    def write(self, path: Path) -> None:
        """Write the job to a JSON file."""
        write_text(path, json.dumps(asdict(self), indent=1))


def prepare(config: Config, out: Path, resume: bool) -> Path:
    """Prepare a run folder for its coordinator.

    Returns:
        Path of the job file.
    """
    config = _federated(config)
    refused_before = RunFolder.nothing_began(out)  # such a start leaves only its files for the coordinator
    if not resume and not refused_before:
        require_unused(out, "--out", OR_RESUME)
    RunFolder.check(out, dump(config), resume or refused_before)
    RunRegistry.open(out)
    status_folder = out / FEDERATION_FOLDER
    with folder_lock(out), folder_lock(status_folder):
        RunStatus.begin(status_folder, "submitted")
        write_text(status_folder / "config.yaml", dump(config))
        Job(str(status_folder / "config.yaml"), str(out)).write(status_folder / "job.json")
    return status_folder / "job.json"


def prepare_plan(cells: Mapping[str, Config], out: Path) -> None:
    """Prepare a folder for several runs that silos approve as one; nothing is written if one cannot be federated.

    Args:
        cells: name of each run, and of its folder in `out` → its configuration.
        out: the folder, new or of the same plan.
    """
    if len({(*sorted(_federated(config).federation.silos),) for config in cells.values()}) > 1:
        raise InputError("federation.silos: must be the same in all runs of a plan")
    status_folder = out / FEDERATION_FOLDER
    file = status_folder / "job.json"
    if file.exists() and Job.read(file).cells != tuple(cells):
        raise InputError(f"--resume: {out} was made for other runs; choose another folder")
    for name, config in cells.items():
        prepare(config, out / name, (out / name).exists())
    with folder_lock(out), folder_lock(status_folder):
        RunRegistry.open(out).write(out)
        RunStatus.begin(status_folder, "submitted")
        Job("", str(out), cells=tuple(cells)).write(file)


def _federated(config: Config) -> Config:
    """Return a run's configuration on this machine; silos have their own rows: nothing is partitioned."""
    check_federated(config)
    if not config.federation.silos:
        raise InputError("federation.silos: name the silos that take part")
    return on_this_machine(config).model_copy(update={"partition": PartitionConfig()})
