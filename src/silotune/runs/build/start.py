"""What a run begins with, as the key `start` names it: an imported LoRA, or the parts of a finished run."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import partial
from pathlib import Path

from silotune.config import Config, load_resolved
from silotune.config.head import HeadConfig
from silotune.core.files import damage_named, file_sha256, write_bytes, write_text
from silotune.core.serialization import read_tensor_file
from silotune.core.tensors import State, Tensors, digest, unflatten
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.methods import Method
from silotune.methods.parts import Scope, names_with
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners import TUNERS
from silotune.models.tuners.start_adapter import FILE, START_ALLOWED, unpack
from silotune.runs.build.resolve import make_method
from silotune.runs.model_file import (
    MODEL_FILE,
    MODELS,
    OWN_FILE,
    SHARED_FILE,
    SHARED_FOLDER,
    TunerFields,
    read_model_file,
    recorded_files,
)
from silotune.runs.storage.readers import read_summary, read_versions
from silotune.training.context import TrainingContext
from silotune.training.initial_parts import TrainedParts

_MAY_CHANGE = {"dropout", "lr_ratio"}
"""Options of tuners that are about training alone."""

_DIGEST = "start.sha256"


def read_start(
    config: Config, method: Method, tasks: Collection[Task], backbone: Backbone
) -> Tensors | TrainedParts | None:
    """Read what the key `start` names; None without it."""
    if config.start is None:
        return None
    source, tuner = Path(config.start), method.setting.tuner
    if not source.exists():
        raise InputError(f"start: {source} cannot be read (No such file or directory); {START_ALLOWED}")
    if (source / MODELS).is_dir():
        _check_run(source, config, method, tasks, backbone)
        return TrainedParts(str(source), partial(_read_parts, source, method.centralized))
    if any((source / folder / "config.yaml").exists() for folder in (".", "federation")):
        raise InputError(f"start: {source} is a run that has not finished, and holds no models yet; {START_ALLOWED}")
    if not tuner.implements("read_initial"):
        allowed = ", ".join(f"tuner={name}" for name, kind in TUNERS.items() if kind.implements("read_initial"))
        raise InputError(f"start: {source} is a LoRA, the run's tuner is {tuner.name}; allowed: {allowed}")
    return tuner.read_initial(config.start, backbone)


def keep_start(run: Path, context: TrainingContext) -> None:
    """Note in the run folder what the run began with, or on resume check that it is still the same.

    Of an imported LoRA there is a copy; a finished run's parts stay where they lie, and their sha256 is kept.
    """
    start = context.initial.start
    if isinstance(start, TrainedParts):
        path, fingerprint = run / _DIGEST, _digest_of(Path(start.source))
        if path.exists() and path.read_text(encoding="utf-8") != fingerprint:
            raise InputError(f"--resume: {run} began from other models than {start.source} holds now")
        write_text(path, fingerprint)
    elif start is not None:
        path = run / FILE
        if not path.exists():
            write_bytes(path, context.method.setting.tuner.pack_initial(start))
        elif digest(unpack(path).tensors) != digest(start):
            raise InputError(f"--resume: {run} began from another LoRA than 'start' names now")


def _check_run(source: Path, config: Config, method: Method, tasks: Collection[Task], backbone: Backbone) -> None:
    """Refuse a finished run whose tensors would mean something else in this one."""
    models = sorted((source / MODELS).glob(f"*/{MODEL_FILE}"))
    with damage_named(source):
        if models:
            files = [read_model_file(path)[1] for path in models]
            weights, seed, tuner = files[0].backbone_sha256, files[0].seed, files[0].tuner
            head = HeadConfig.model_validate(files[0].head)
            source_tasks = {file.task["name"]: file.task for file in files}
            name, parts = files[0].method["name"], {part: fields.scope for part, fields in files[0].parts.items()}
        else:  # a coordinator's folder, whose silos keep their models
            before = load_resolved(source / "config.yaml")
            weights, seed, head = read_versions(source)["backbone"], before.seed, before.head
            source_method = make_method(before)
            tuner, name = TunerFields.of(source_method.setting.tuner), source_method.name
            parts = {part: fields.scope for part, fields in source_method.parts().items()}
            source_tasks = {task["name"]: task for task in read_summary(source)["tasks"].values()}
        labels = {name: list(task["labels"]) for name, task in source_tasks.items()}
    if weights != backbone.fingerprint:
        raise InputError(f"start: {source} has another backbone than {config.backbone.name!r} is now (weights differ)")
    own, was = TunerFields.of(method.setting.tuner).options, tuner.options
    pairs: list[tuple[str, object, object]] = [
        ("tuner", tuner.name, config.tuner.name),
        ("head", head.name, config.head.name),
    ]
    if config.head.pools:
        pairs.append(("head.pooling", "first" if head.pooling == "auto" else head.pooling, method.setting.head.pooling))
    pairs += [(f"tuner.{name}", was.get(name), own.get(name)) for name in sorted({*was, *own} - _MAY_CHANGE)]
    if names_with(method.parts(), Scope.FIXED):  # they are drawn from it
        pairs.append(("seed", seed, config.seed))
    for key, old, new in pairs:
        if old != new:
            raise InputError(f"start: {source} was trained with {key}={old}, this run has {new}; give the same")
    for part, definition in method.parts().items():
        if definition.scope is not Scope.FIXED and not definition.redrawn and parts.get(part) is not definition.scope:
            raise InputError(
                f"start: {source} was trained with method={name}, which has no {definition.scope.value} part {part!r}; "
                "allowed: a run of the same method, tuner, head and labels"
            )
    for task in tasks:
        if labels.get(task.name, list(task.labels)) != list(task.labels):
            there, here = (", ".join(names) or "none" for names in (labels[task.name], task.labels))
            raise InputError(f"start: the labels of {task.name!r} are {here}; {source} was trained with {there}")


def _read_parts(source: Path, centralized: bool, silo: str | None) -> State | None:
    """Return the trained private parts of a silo, or with None the shared ones; see `TrainedParts.read`."""
    if not (source / MODELS).is_dir():
        raise InputError(f"start: {source / MODELS} is gone; silos that did not train yet begin with it")
    folder = source / MODELS / (SHARED_FOLDER if silo is None else silo)
    if centralized and silo is not None:  # all silos have the parts of the one that trains
        folder = next((source / MODELS).glob(f"*/{MODEL_FILE}")).parent
    if silo is not None and not folder.is_dir():
        return None
    name, files = SHARED_FILE if silo is None else OWN_FILE, recorded_files(folder)
    if not (folder / name).exists() and name not in (files or {}):
        return {}
    return unflatten(read_tensor_file(folder, name, files))


def _digest_of(source: Path) -> str:
    """Return the sha256 of all tensors that lie in a finished run's models."""
    sha = hashlib.sha256()
    for path in sorted((source / MODELS).rglob("*.safetensors")):
        sha.update(f"{path.relative_to(source)} {file_sha256(path)}\n".encode())
    return sha.hexdigest()
