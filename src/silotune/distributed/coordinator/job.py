"""Describe a coordinator's job, prepare its run folder, and keep which silos take part in the run."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainValidator, TypeAdapter

from silotune.config import Config, dump
from silotune.config.data import PartitionConfig
from silotune.core.files import damage_named, folder_lock, read_json, write_text
from silotune.core.records import Records
from silotune.data.tasks import Task, read_task
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER, RunStatus
from silotune.distributed.protocol.frames import Frame, HandshakeRefused
from silotune.distributed.protocol.handshake import NO_LIST, Hello, Identity, check_federated, check_identity
from silotune.errors import OR_RESUME, InputError, require_unused
from silotune.runs.build.resolve import resolve
from silotune.runs.storage.run_folder import RunFolder


@dataclass(frozen=True)
class SiloInfo:
    """A silo's task, the number of texts in a row, and the rank to which its operator bounds its adapters, if any."""

    task: Annotated[Task, PlainValidator(read_task)]
    texts: int
    rank: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "rank" or value is not None}


@dataclass(frozen=True)
class RunRegistry:
    """A run's id and its silos; a resume works even if one of them is absent."""

    run: str
    silos: Mapping[str, SiloInfo]

    @classmethod
    def open(cls, out: Path) -> RunRegistry:
        """Read a run folder's registry, or make a new id if there is none; writes nothing."""
        path = out / FEDERATION_FOLDER / "run.json"
        if path.exists():
            with damage_named(path):
                return _REGISTRY.validate_python(read_json(path))
        if (out / "checkpoints").is_dir() and any((out / "checkpoints").glob("round-*.json")):
            raise InputError(f"--resume: {out} was not made by this engine; resume it with --engine inprocess")
        return cls(secrets.token_hex(8), {})

    @classmethod
    def id_of_start(cls, start: str | None) -> str | None:
        """Return the id of the federation's run in the folder that a run starts from; None: there is none."""
        if start is None or not (Path(start) / FEDERATION_FOLDER / "run.json").exists():
            return None
        return cls.open(Path(start)).run

    def with_silo(self, hello: Hello) -> RunRegistry:
        """Return the registry with one more silo."""
        info = SiloInfo(hello.task, hello.texts, hello.rank)
        entry = self.silos.get(hello.silo, info)
        if replace(entry, rank=info.rank) != info:
            raise HandshakeRefused(f"silo {hello.silo!r}: its task is another than when the run began")
        if entry != info:
            ranks = ["the run's" if rank is None else str(rank) for rank in (info.rank, entry.rank)]
            raise HandshakeRefused(
                f"silo {hello.silo!r}: its LoRA rank is {ranks[0]}, and was {ranks[1]} when the run began; set the key "
                "rank of its silo.yaml back"
            )
        return RunRegistry(self.run, {**self.silos, hello.silo: info})

    def write(self, out: Path) -> None:
        """Write it to a run folder."""
        silos = {name: info.fields() for name, info in self.silos.items()}
        write_text(out / FEDERATION_FOLDER / "run.json", json.dumps({"run": self.run, "silos": silos}, indent=1))


_REGISTRY = TypeAdapter(RunRegistry)

Shapes = Callable[[str], Mapping[str, tuple[int, ...]]]
"""Silo → the shapes of the tensors in its broadcasts, by name."""


class AdmissionPolicy:
    """Admits a silo whose identity equals the coordinator's and whose task is unchanged in this run."""

    def __init__(self, identity: Identity, registry: RunRegistry, record: Records, config: Config) -> None:
        self.identity = identity
        self.registry = registry
        self._record = record
        self._config = config
        self._identities: dict[str, Identity] = {}
        self._shapes: Shapes | None = None
        self.pinned = NO_LIST
        """What all silos said of their list of peers, in a run that sums under masks."""
        self.shares = ""
        """The noise that all silos said they share; empty without."""
        self.noise: dict[str, float] = {}
        """Silo → how many times the noise that a run with noise on rows asks for it gets there."""

    def __call__(self, frame: Frame) -> None:
        """Check a silo's hello and register the silo."""
        hello = Hello.read(frame)
        check_identity(hello.silo, self.identity_for(hello.silo), hello.identity)
        if self._config.aggregation.secure and hello.masks == NO_LIST:
            raise HandshakeRefused(f"silo {hello.silo!r}: tells no masked.peers; aggregation.secure needs all silos'")
        if self._config.privacy.shares and not hello.shares:
            raise HandshakeRefused(
                f"silo {hello.silo!r}: tells no noise and masked.colluders; privacy.shares needs all silos' share"
            )
        if hello.masks != NO_LIST:
            if self.pinned not in (NO_LIST, hello.masks):
                raise HandshakeRefused(
                    f"silo {hello.silo!r}: its masked.peers or masked.least are others than those of the silos before "
                    "it, or its masked.colluders; compare the fingerprints that `silo doctor` shows"
                )
            self.pinned = hello.masks
        if hello.shares:
            if self.shares not in ("", hello.shares):
                raise HandshakeRefused(
                    f"silo {hello.silo!r}: privacy.shares: its machine computes another noise, {hello.shares}, than "
                    f"those before it, {self.shares}; a slightly other privacy.epsilon avoids it"
                )
            self.shares = hello.shares
        self.registry = self.registry.with_silo(hello)
        self._identities[hello.silo] = hello.identity
        noise = {}
        if hello.noise is not None:
            self.noise[hello.silo] = noise["noise"] = hello.noise
        self._record.append({"kind": "joined", "run": self.registry.run, "silo": hello.silo, **noise})

    def expect(self, shapes: Shapes) -> None:
        """Also compare the shapes of shared parts: of admitted silos now, of the others when they answer."""
        self._shapes = shapes
        for name, identity in sorted(self._identities.items()):
            check_identity(name, self.identity_for(name), identity)

    def identity_for(self, silo: str) -> Identity:
        """Return the coordinator's identity, with the shapes of a silo's parts once these are known."""
        return self.identity if self._shapes is None else replace(self.identity, shapes=self._shapes(silo))


@dataclass(frozen=True)
class CoordinatorJob:
    """A coordinator's job.

    Args:
        silos: the silos' names; if empty, those of `federation.silos`.
        local: whether all silos' folders are in the run folder.
        cells: of a plan, the names of its runs, each in a folder of `out`, with its own configuration.
    """

    config: str
    out: str
    silos: tuple[str, ...] = ()
    labelled: str | None = None
    local: bool = False
    cells: tuple[str, ...] = ()

    def cell(self, name: str) -> CoordinatorJob:
        """Return the job of one of a plan's runs."""
        out = Path(self.out) / name
        return CoordinatorJob(str(out / FEDERATION_FOLDER / "config.yaml"), str(out), self.silos, self.labelled)

    @classmethod
    def read(cls, path: str | Path) -> CoordinatorJob:
        """Read a job from a JSON file."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**(fields | {name: tuple(fields.get(name, ())) for name in ("silos", "cells")}))

    def write(self, path: Path) -> None:
        """Write the job to a JSON file."""
        write_text(path, json.dumps(asdict(self), indent=1))


def prepare(config: Config, out: Path, resume: bool) -> Path:
    """Prepare a run folder for its coordinator, and return the path of the job's file."""
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
        CoordinatorJob(str(status_folder / "config.yaml"), str(out)).write(status_folder / "job.json")
    return status_folder / "job.json"


def prepare_plan(cells: Mapping[str, Config], out: Path) -> None:
    """Prepare a folder for several runs that silos approve as one; nothing is written if one cannot be federated."""
    if len({(*sorted(_federated(config).federation.silos),) for config in cells.values()}) > 1:
        raise InputError("federation.silos: must be the same in all runs of a plan")
    status_folder = out / FEDERATION_FOLDER
    file = status_folder / "job.json"
    if file.exists() and CoordinatorJob.read(file).cells != tuple(cells):
        raise InputError(f"--resume: {out} was made for other runs; choose another folder")
    for name, config in cells.items():
        prepare(config, out / name, (out / name).exists())
    with folder_lock(out), folder_lock(status_folder):
        RunRegistry.open(out).write(out)
        RunStatus.begin(status_folder, "submitted")
        CoordinatorJob("", str(out), cells=tuple(cells)).write(file)


def _federated(config: Config) -> Config:
    """Return a run's configuration on this machine; silos have their own rows: nothing is partitioned."""
    check_federated(config)
    if not config.federation.silos:
        raise InputError("federation.silos: name the silos that take part")
    return resolve(config).config.replace(partition=PartitionConfig())
