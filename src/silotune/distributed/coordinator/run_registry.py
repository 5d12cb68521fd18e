"""What a coordinator remembers of a run: its id, and what silos said of their tasks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from silotune.core.files import write_text
from silotune.data.tasks import Task, read_task
from silotune.distributed.protocol.handshake import HandshakeRefused, Hello
from silotune.errors import InputError

FOLDER = "federation"
"""The part of the run folder that is about the machines: who took part, progress, how it ended."""


@dataclass(frozen=True)
class SiloInfo:
    """A silo's task, and how many texts a row has."""

    task: Task
    texts: int

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> SiloInfo:
        """From plain values."""
        return cls(read_task(fields["task"]), int(fields["texts"]))


@dataclass(frozen=True)
class RunRegistry:
    """A run's id and its silos; one of them may be absent when the coordinator starts again."""

    run: str
    silos: Mapping[str, SiloInfo]

    @classmethod
    def open(cls, out: Path) -> RunRegistry:
        """Of a run folder; a new id where nothing began. Nothing is changed.

        Raises:
            InputError: damaged, or a run by another engine.
        """
        path = out / FOLDER / "run.json"
        if path.exists():
            try:
                fields = json.loads(path.read_text(encoding="utf-8"))
                return cls(str(fields["run"]), {name: SiloInfo.read(silo) for name, silo in fields["silos"].items()})
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f"{path}: damaged ({error})") from error
        if (out / "checkpoints").is_dir() and any((out / "checkpoints").glob("round-*.json")):
            raise InputError(f"--resume: {out} was not made by this engine; resume it with --engine inprocess")
        return cls(secrets.token_hex(8), {})

    @classmethod
    def check(cls, out: Path) -> None:
        """Refuse what `open` would refuse.

        Raises:
            InputError: as `open`.
        """
        cls.open(out)

    def with_silo(self, hello: Hello) -> RunRegistry:
        """Knowing one silo more, or the same silo again.

        Raises:
            HandshakeRefused: its task is another one now.
        """
        said = SiloInfo(hello.task, hello.texts)
        if self.silos.get(hello.silo, said) != said:
            raise HandshakeRefused(f"silo {hello.silo!r}: its task is another than when the run began")
        return RunRegistry(self.run, {**self.silos, hello.silo: said})

    def write(self, out: Path) -> None:
        """Keep it in a run folder."""
        silos = {name: asdict(known) for name, known in self.silos.items()}
        write_text(out / FOLDER / "run.json", json.dumps({"run": self.run, "silos": silos}, indent=1))
