"""A run's folder: configuration, versions, events and checkpoints, claimed by one process at a time."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from silotune.config import Config, differences
from silotune.config.head import PLAIN, HeadConfig
from silotune.core.clock import utc_now
from silotune.core.files import LOCK_FILE, folder_lock, load_yaml, make_folder, write_text
from silotune.core.provenance import made_on
from silotune.core.records import FILE as RECORDS
from silotune.data.hub import hub_fingerprints
from silotune.data.rows import SPLITS, RowDigests, SiloData
from silotune.errors import OR_RESUME, InputError, require_unused
from silotune.models.backbone.backbone import Backbone
from silotune.runs.storage.checkpoints import Checkpoints
from silotune.runs.storage.readers import EVENTS, events, read_versions
from silotune.version import __version__

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")

FEDERATION = "federation."
MAY_DIFFER = (FEDERATION, "state.")
"""Beginnings of the names of keys that may differ when a run is resumed."""


class RunFolder:
    """A run's folder. Make one by `working_in`, or by `begin` if this process has claimed the folder already."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._events = str(path / EVENTS)
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.changed: list[str] = []
        """Libraries whose versions are others than when the run began, for the events of a run that goes on."""

    @classmethod
    def begin(
        cls,
        path: Path,
        config: str,
        backbone: Backbone,
        resume: bool = False,
        may_differ: Sequence[str] = MAY_DIFFER,
    ) -> RunFolder:
        """Open the folder if it holds a run, otherwise create it; arguments as for `open` and `create`."""
        if (path / "config.yaml").exists():
            return cls.open(path, config, backbone, may_differ)
        return cls.create(path, config, backbone.fingerprint, resume)

    @classmethod
    def check(cls, path: Path, config: str, resume: bool = False, may_differ: Sequence[str] = MAY_DIFFER) -> None:
        """Refuse a folder that `begin` would refuse over any backbone; nothing is changed."""
        if (path / "config.yaml").exists():
            cls._made(path, config, may_differ)
        elif resume and not cls.nothing_began(path):
            raise InputError(f"--resume: {path} is not a run folder")
        elif not resume and [*path.glob("*")] != [path / LOCK_FILE]:
            require_unused(path, "--out", OR_RESUME)

    @staticmethod
    def nothing_began(path: Path) -> bool:
        """Return whether a folder is missing, empty, or left by a run that ended before its first round."""
        return not path.is_file() and (not path.is_dir() or all(_begun(entry) for entry in path.iterdir()))

    @classmethod
    def create(cls, path: Path, config: str, backbone: str, resume: bool = False) -> RunFolder:
        """Start a run in an empty or new folder; with `resume`, also in one that a killed `create` left behind."""
        cls.check(path, config, resume)
        folder = cls(path)
        make_folder(folder.checkpoints.path, f"--out {path}")
        write_text(
            path / "versions.json", json.dumps({**versions(), **made_on(), "backbone": backbone}, indent=1) + "\n"
        )
        write_text(path / "config.yaml", config)
        return folder

    @classmethod
    def open(cls, path: Path, config: str, backbone: Backbone, may_differ: Sequence[str] = MAY_DIFFER) -> RunFolder:
        """Open a run to resume it."""
        origin = cls._made(path, config, may_differ)
        if backbone.fingerprint != origin["backbone"]:
            raise InputError(f"--resume: {path} was made with another backbone (its weights differ)")
        folder = cls(path)
        folder.checkpoints.path.mkdir(exist_ok=True)
        before = (path / "config.yaml").read_text(encoding="utf-8")
        changed = differences(before, config)
        if changed:
            kind = "federation" if all(name.startswith(FEDERATION) for name in changed) else "changed"
            folder.event(kind, changed=changed)
            write_text(path / "config.yaml", config)
        # it can go on, but not to the bits that an undisturbed run would have
        folder.changed = [
            f"{name} {origin.get(name)} → {now}" for name, now in versions().items() if origin.get(name) != now
        ]
        return folder

    def describe_data(self, silos: Sequence[SiloData]) -> None:
        """Add to `versions.json` the fingerprints of the silos' rows, and of data sets read from the hub."""
        record, digests = read_versions(self.path), RowDigests()
        if "rows" in record:  # of a run that goes on
            return
        rows = {silo.name: {split: digests.of(silo.splits, split) for split in SPLITS} for silo in silos}
        text = json.dumps(record | {"rows": rows, "data_sets": dict(hub_fingerprints)}, indent=1)
        write_text(self.path / "versions.json", text + "\n")

    @staticmethod
    def _made(path: Path, config: str, may_differ: Sequence[str]) -> dict[str, Any]:
        """Return the versions and the backbone's fingerprint with which a run of this configuration was made."""
        try:
            before, origin = (path / "config.yaml").read_text(encoding="utf-8"), read_versions(path)
        except (OSError, ValueError, InputError) as error:
            raise InputError(f"--resume: {path} is not a run folder") from error
        fixed = [changed for changed in differences(before, config) if not changed.startswith(tuple(may_differ))]
        if fixed:
            raise InputError(f"--resume: {path} was made with another configuration ({fixed[0]})")
        return origin

    def event(self, kind: str, **fields: object) -> None:
        """Append one line to `events.jsonl`, with the time."""
        line = json.dumps({"event": kind, **fields, "time": utc_now()}) + "\n"
        file = os.open(self._events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def forget_events_after(self, number: int) -> None:
        """Drop events of rounds that no checkpoint holds, and a last line cut off by a kill."""
        self._keep_events(lambda event: event.get("round", 0) <= number)

    def forget_event(self, kind: str, number: int) -> None:
        """Drop the events of one kind and round."""
        self._keep_events(lambda event: (event["event"], event.get("round")) != (kind, number))

    def _keep_events(self, keeps: Callable[[dict[str, Any]], bool]) -> None:
        path = self.path / EVENTS
        if path.exists():
            write_text(path, "".join(json.dumps(event) + "\n" for event in events(self.path) if keeps(event)))


@contextmanager
def working_in(
    path: Path, config: str, backbone: Backbone, resume: bool = False, may_differ: Sequence[str] = MAY_DIFFER
) -> Iterator[RunFolder]:
    """Open or create a run's folder, and keep other processes out while the context lasts; see `RunFolder.begin`."""
    RunFolder.check(path, config, resume, may_differ)
    with folder_lock(path):
        folder = RunFolder.begin(path, config, backbone, resume, may_differ)
        try:
            yield folder
        finally:
            folder.checkpoints.close()


def _begun(entry: Path) -> bool:
    """Return whether `create` may have left this entry when it was killed before its last step."""
    if entry.name == "checkpoints":  # silos on this machine record what they answered from their first answer on
        names = (RECORDS, "secret.key")
        return entry.is_dir() and all(path.is_dir() or path.name.startswith(names) for path in entry.rglob("*"))
    if entry.name in ("federation", "silos"):  # what is there before a federation's coordinator makes the run folder
        return entry.is_dir()
    return entry.name in ("versions.json", LOCK_FILE) or entry.name.startswith((".versions.json.", ".config.yaml."))


def continued(config: Config, path: Path) -> Config:
    """Return the configuration for resuming a run; keys that are not given are those the run started with.

    Bits depend on `threads` and on the value of `train.tokens_at_once=auto`, so both stay as they were.
    """
    file = path / "config.yaml"
    tree = load_yaml(file.read_text(encoding="utf-8")) if file.is_file() else None
    if not isinstance(tree, dict):
        return config
    if config.threads is None and isinstance(tree.get("threads"), int):
        config = config.replace(threads=tree["threads"])
    config = config.replace(head=_continued_head(config.head, tree.get("head") or {}))
    limit = (tree.get("train") or {}).get("tokens_at_once")
    if config.train.tokens_at_once == "auto" and isinstance(limit, int):
        config = config.replace(train={"tokens_at_once": limit})
    return config


def _continued_head(head: HeadConfig, before: Mapping[str, Any]) -> HeadConfig:
    """Return the section `head` with the pooling and the template that the run began with."""
    fields: dict[str, Any] = {}
    if head.pooling == "auto" and before.get("pooling"):
        fields["pooling"] = before["pooling"]
    if head.writes and head.template is None and "template" in before:
        fields["template"] = before["template"] or PLAIN
    return head.replace(**fields)


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of Python and of the libraries that may change a result; read once, from files."""
    installed = {"python": platform.python_version(), "silotune": __version__}
    for name in _LIBRARIES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "not installed"
    return MappingProxyType(installed)
