"""Describes what a coordinator is to do, and makes a run folder ready for it."""

from __future__ import annotations

import json
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
    """

    config: str
    out: str
    silos: tuple[str, ...] = ()
    labelled: str | None = None
    local: bool = False

    @classmethod
    def read(cls, path: str | Path) -> Job:
        """Read a job from a JSON file."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**(fields | {"silos": tuple(fields["silos"])}))

    def write(self, path: Path) -> None:
        """Write the job to a JSON file."""
        write_text(path, json.dumps(asdict(self), indent=1))


def prepare(config: Config, out: Path, resume: bool) -> Path:
    """Prepare a run folder for its coordinator.

    Args:
        config: the run's.
        out: the run folder.
        resume: continue an interrupted run.

    Returns:
        Path of the job file.
    """
    check_federated(config)
    # silos have their own rows: nothing is partitioned, and there is no central test set
    config = on_this_machine(config).model_copy(update={"partition": PartitionConfig()})
    if not config.federation.silos:
        raise InputError("federation.silos: name the silos that take part")
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
