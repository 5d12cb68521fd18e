"""Which silos take part in a run: admitted by their handshake, and kept in the run folder with the run's id."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from silotune.core.files import write_text
from silotune.core.records import Records
from silotune.data.tasks import Task, read_task
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER
from silotune.distributed.protocol.frames import Frame, HandshakeRefused
from silotune.distributed.protocol.handshake import Hello, Identity, check_identity
from silotune.errors import InputError


@dataclass(frozen=True)
class SiloInfo:
    """A silo's task, the number of texts in a row, and the rank to which its operator bounds its adapters, if any."""

    task: Task
    texts: int
    rank: int | None = None

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> SiloInfo:
        """Parse the plain values in `run.json`."""
        rank = fields.get("rank")
        return cls(read_task(fields["task"]), int(fields["texts"]), None if rank is None else int(rank))

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
            try:
                fields = json.loads(path.read_text(encoding="utf-8"))
                return cls(str(fields["run"]), {name: SiloInfo.read(silo) for name, silo in fields["silos"].items()})
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f"{path}: damaged ({error})") from error
        if (out / "checkpoints").is_dir() and any((out / "checkpoints").glob("round-*.json")):
            raise InputError(f"--resume: {out} was not made by this engine; resume it with --engine inprocess")
        return cls(secrets.token_hex(8), {})

    def with_silo(self, hello: Hello) -> RunRegistry:
        """Return the registry with one more silo."""
        info = SiloInfo(hello.task, hello.texts, hello.rank)
        known = self.silos.get(hello.silo, info)
        if replace(known, rank=info.rank) != info:
            raise HandshakeRefused(f"silo {hello.silo!r}: its task is another than when the run began")
        if known != info:
            ranks = ["the run's" if rank is None else str(rank) for rank in (info.rank, known.rank)]
            raise HandshakeRefused(
                f"silo {hello.silo!r}: its LoRA rank is {ranks[0]}, and was {ranks[1]} when the run began; set the key "
                "rank of its silo.yaml back"
            )
        return RunRegistry(self.run, {**self.silos, hello.silo: info})

    def write(self, out: Path) -> None:
        """Write it to a run folder."""
        silos = {name: info.fields() for name, info in self.silos.items()}
        write_text(out / FEDERATION_FOLDER / "run.json", json.dumps({"run": self.run, "silos": silos}, indent=1))


Shapes = Callable[[str], Mapping[str, tuple[int, ...]]]
"""Silo → the shapes of the tensors in its broadcasts, by name."""


class AdmissionPolicy:
    """Admits a silo whose identity equals the coordinator's and whose task is unchanged in this run."""

    def __init__(self, identity: Identity, registry: RunRegistry, record: Records) -> None:
        self.identity = identity
        self.registry = registry
        self._record = record
        self._identities: dict[str, Identity] = {}
        self._shapes: Shapes | None = None

    def __call__(self, frame: Frame) -> None:
        """Check a silo's hello and register the silo."""
        hello = Hello.read(frame)
        check_identity(hello.silo, self.identity_for(hello.silo), hello.identity)
        self.registry = self.registry.with_silo(hello)
        self._identities[hello.silo] = hello.identity
        self._record.append({"kind": "joined", "run": self.registry.run, "silo": hello.silo})

    def expect(self, shapes: Shapes) -> None:
        """Also compare the shapes of shared parts: of admitted silos now, of the others when they answer."""
        self._shapes = shapes
        for name, identity in sorted(self._identities.items()):
            check_identity(name, self.identity_for(name), identity)

    def identity_for(self, silo: str) -> Identity:
        """Return the coordinator's identity, with the shapes of a silo's parts once these are known."""
        return self.identity if self._shapes is None else replace(self.identity, shapes=self._shapes(silo))
