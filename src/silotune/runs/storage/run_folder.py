"""`RunFolder` writes events and each `Checkpoint`, and reads them; `working_in` claims the folder for a process.

A checkpoint is a manifest (`checkpoints/round-0007.json`) that names the file of the shared parts and, for every silo
that ever took part, the file of its last state. Files are written first, while silos train, and the manifest is moved
into place last, so that a run killed at any instant finds a whole checkpoint, old or new. Only one process works in a
run folder at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from silotune.config import Config, differences
from silotune.core.async_writer import AsyncWriter
from silotune.core.clock import utc_now
from silotune.core.files import make_folder, read_bytes, read_json, write_text
from silotune.core.locking import LOCK_FILE, folder_lock
from silotune.core.serialization import read_tensors
from silotune.core.tensors import State, Tensors, flatten
from silotune.core.yaml_text import load_yaml
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.runs.storage.environment import versions
from silotune.runs.storage.readers import events, read_versions


@dataclass(frozen=True)
class Checkpoint:
    """One round's manifest: the files of its states, and the run's `History` as plain values."""

    round: int
    shared: str
    silos: dict[str, str]
    history: dict[str, Any]

    @property
    def files(self) -> set[str]:
        """The tensor files this checkpoint needs."""
        return {self.shared, *self.silos.values()}


class RunFolder:
    """A run's folder. Make one by `working_in`, or where the folder is claimed already by `begin`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._made_folders: set[Path] = set()
        self._files: set[str] | None = None
        """The tensor files that a commit may drop: what was there at the first one, and what was written since.

        Silos of a federation on this machine write theirs here as well, and drop them themselves.
        """
        self._writer = AsyncWriter()
        self.changed: list[str] = []
        """Libraries whose versions are others than when the run began, for the events of a run that goes on."""

    @classmethod
    def begin(cls, path: Path, config: str, backbone: Backbone, resume: bool = False) -> RunFolder:
        """Open the folder if it holds a run, otherwise create it."""
        if (path / "config.yaml").exists():
            return cls.open(path, config, backbone)
        return cls.create(path, config, backbone.fingerprint, resume)

    @classmethod
    def check(cls, path: Path, config: str, resume: bool = False) -> None:
        """Refuse a folder that `begin` would refuse over any backbone; nothing is changed.

        Raises:
            InputError: as `create` and `open`.
        """
        if (path / "config.yaml").exists():
            cls._made(path, config)
            return
        if resume and not cls.nothing_began(path):
            raise InputError(f"--resume: {path} is not a run folder")
        there = [] if not path.is_dir() else [entry for entry in path.iterdir() if entry.name != LOCK_FILE]
        if not resume and (path.is_file() or there):
            raise InputError(f"--out {path}: already there and not empty; choose another folder or add --resume")

    @staticmethod
    def nothing_began(path: Path) -> bool:
        """Return whether a folder is missing, empty, or what a run left that was refused or killed before it began."""
        return not path.is_file() and (not path.is_dir() or all(_begun(entry) for entry in path.iterdir()))

    @classmethod
    def create(cls, path: Path, config: str, backbone: str, resume: bool = False) -> RunFolder:
        """Start a run in an empty or new folder; to resume, also where `create` itself was killed.

        Args:
            path: the folder.
            config: the configuration's text.
            backbone: the backbone's fingerprint.
            resume: whether a folder that was begun is taken.

        Raises:
            InputError: if the folder holds anything else.
        """
        cls.check(path, config, resume)
        folder = cls(path)
        make_folder(folder.checkpoints, f"--out {path}")
        write_text(path / "versions.json", json.dumps({**versions(), "backbone": backbone}, indent=1) + "\n")
        write_text(path / "config.yaml", config)
        return folder

    @classmethod
    def open(cls, path: Path, config: str, backbone: Backbone) -> RunFolder:
        """Open a run to resume it.

        Raises:
            InputError: not a run folder, or made with another configuration or backbone. The section `federation` may
                differ, with an event; other versions of libraries are only named, in `changed`.
        """
        made = cls._made(path, config)
        if not backbone.has_fingerprint(made["backbone"]):
            raise InputError(f"--resume: {path} was made with another backbone (its weights differ)")
        folder = cls(path)
        folder.checkpoints.mkdir(exist_ok=True)
        before = (path / "config.yaml").read_text(encoding="utf-8")
        changed = differences(before, config)  # of the section `federation`
        if changed:
            folder.event("federation", changed=changed)
            write_text(path / "config.yaml", config)
        # it can go on, but not to the bits that an undisturbed run would have
        folder.changed = [
            f"{name} {made.get(name)} → {now}" for name, now in versions().items() if made.get(name) != now
        ]
        return folder

    @staticmethod
    def _made(path: Path, config: str) -> dict[str, Any]:
        """Return the versions and the backbone's fingerprint with which a run of this configuration was made."""
        try:
            before, made = (path / "config.yaml").read_text(encoding="utf-8"), read_versions(path)
        except (OSError, ValueError, InputError) as error:
            raise InputError(f"--resume: {path} is not a run folder") from error
        fixed = [difference for difference in differences(before, config) if not difference.startswith("federation.")]
        if fixed:
            raise InputError(f"--resume: {path} was made with another configuration ({fixed[0]})")
        return made

    def event(self, kind: str, **fields: object) -> None:
        """Append one line to `events.jsonl`, with the time."""
        line = json.dumps({"event": kind, **fields, "time": utc_now()}) + "\n"
        with (self.path / "events.jsonl").open("ab", buffering=0) as file:
            file.write(line.encode())

    def forget_events_after(self, number: int) -> None:
        """Drop events of rounds that no checkpoint holds, and a last line cut off by a kill."""
        path = self.path / "events.jsonl"
        if path.exists():
            kept = [event for event in events(self.path) if event.get("round", 0) <= number]
            write_text(path, "".join(json.dumps(event) + "\n" for event in kept))

    def forget_event(self, kind: str, number: int) -> None:
        """Drop the events of one kind and round."""
        path = self.path / "events.jsonl"
        if path.exists():
            kept = [event for event in events(self.path) if (event["event"], event.get("round")) != (kind, number)]
            write_text(path, "".join(json.dumps(event) + "\n" for event in kept))

    def write(self, name: str, tensors: Tensors) -> str:
        """Write a tensor file, and return its name. It is there for certain after `commit`.

        Until then nobody may change the tensors.
        """
        path = self.checkpoints / f"{name}.safetensors"
        if path.parent not in self._made_folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._made_folders.add(path.parent)
        self._writer.write(path, tensors)
        if self._files is not None:
            self._files.add(f"{name}.safetensors")
        return f"{name}.safetensors"

    def read(self, name: str) -> Tensors:
        """Read a tensor file.

        Raises:
            InputError: if it is missing or damaged.
        """
        self._writer.finish()
        path = self.checkpoints / name
        try:
            return read_tensors(read_bytes(path))
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"checkpoint file {path}: missing or damaged ({error})") from error

    def commit(self, checkpoint: Checkpoint, keep: Checkpoint | None = None) -> None:
        """Make a checkpoint the newest; drop files that neither it nor `keep` needs."""
        text = json.dumps(checkpoint.__dict__, indent=1)
        self._writer.finish()
        write_text(self._manifest(checkpoint.round), text)
        kept = checkpoint.files | (keep.files if keep else set())
        manifests = {checkpoint.round} | ({keep.round} if keep else set())
        if self._files is None:  # what a run that was killed left, too
            self._files = set(self._tensor_files())
        self._writer.remove([self.checkpoints / name for name in sorted(self._files - kept)])
        self._files &= kept
        for number in self._rounds() - manifests:
            self._manifest(number).unlink()

    def _tensor_files(self) -> Iterator[str]:
        """The tensor files there, as checkpoints name them."""
        for directory, _, names in os.walk(self.checkpoints):
            folder = Path(directory).relative_to(self.checkpoints)
            yield from ((folder / name).as_posix() for name in names if name.endswith(".safetensors"))

    def close(self) -> None:
        """Finish writing; nothing is written afterwards."""
        self._writer.close()

    def forget_checkpoints(self) -> None:
        """Remove them. Manifests go first: a run that is killed meanwhile begins anew."""
        self.close()
        for number in self._rounds():
            self._manifest(number).unlink()
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint."""
        rounds = self._rounds()
        return self.load(max(rounds)) if rounds else None

    def _rounds(self) -> set[int]:
        """The rounds that have a manifest."""
        found = (re.fullmatch(r"round-(\d+)\.json", path.name) for path in self.checkpoints.iterdir() if path.is_file())
        return {int(match[1]) for match in found if match}

    def _manifest(self, number: int) -> Path:
        return self.checkpoints / f"round-{number:04d}.json"

    def load(self, number: int) -> Checkpoint:
        """A round's checkpoint.

        Raises:
            InputError: if it is missing or damaged.
        """
        path = self._manifest(number)
        try:
            checkpoint = Checkpoint(**read_json(path))
            outside = [name for name in checkpoint.files if Path(name).is_absolute() or ".." in Path(name).parts]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise InputError(f"checkpoint {path}: missing or damaged ({error})") from error
        if outside:
            raise InputError(f"checkpoint {path}: damaged (names a file outside the run folder: {outside[0]})")
        if checkpoint.round != number:
            raise InputError(f"checkpoint {path}: damaged (is of round {checkpoint.round!r})")
        return checkpoint


@contextmanager
def working_in(path: Path, config: str, backbone: Backbone, resume: bool = False) -> Iterator[RunFolder]:
    """Open or create a run's folder, and keep other processes out while the context lasts.

    Raises:
        InputError: if the folder cannot be used (`RunFolder.begin`) or another process works in it.
    """
    RunFolder.check(path, config, resume)
    with folder_lock(path):
        folder = RunFolder.begin(path, config, backbone, resume)
        try:
            yield folder
        finally:
            folder.close()


@contextmanager
def validated_state(file: str, expected: State) -> Iterator[Callable[[State], None]]:
    """Refuse a checkpoint file whose tensors are not those of this run; yields the check of the state that was read.

    Raises:
        InputError: naming the file.
    """

    def check(state: State) -> None:
        read, wanted = ({n: (t.shape, t.dtype) for n, t in flatten(some).items()} for some in (state, expected))
        differing = sorted(name for name in {*read, *wanted} if read.get(name) != wanted.get(name))
        if differing:
            raise ValueError(f"tensor {differing[0]!r} is missing, unexpected or of another shape")

    try:
        yield check
    except (KeyError, ValueError) as error:
        raise InputError(f"checkpoint file {file}: damaged ({error})") from error


def _begun(entry: Path) -> bool:
    """Return whether `create` may have left this entry when it was killed before its last step."""
    if entry.name == "checkpoints":  # silos on this machine record what they answered from their first answer on
        return entry.is_dir() and all(path.is_dir() or path.name.startswith("audit.") for path in entry.rglob("*"))
    if entry.name in ("federation", "silos"):  # what is there before a federation's coordinator makes the run folder
        return entry.is_dir()
    return entry.name in ("versions.json", LOCK_FILE) or entry.name.startswith((".versions.json.", ".config.yaml."))


def continued(config: Config, path: Path) -> Config:
    """Return the configuration with which to go on with a run that may be older than the key `evaluation.validation`.

    Such a run validates by the metric, in whatever round it was interrupted.
    """
    file = path / "config.yaml"
    if config.evaluation.validation is not None or not file.is_file():
        return config
    tree = load_yaml(file.read_text(encoding="utf-8"))
    if not isinstance(tree, dict) or "validation" in (tree.get("evaluation") or {}):
        return config
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"validation": "metric"})})
