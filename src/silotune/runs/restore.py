"""Put a finished run's federation together from its checkpoints, without its rows; `import_run` makes its models."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from silotune.aggregation import may_have_state, uniform
from silotune.config import Config, load_resolved
from silotune.config.head import PLAIN
from silotune.config.validators import NAME_RULE, is_name
from silotune.core.files import damage_named
from silotune.core.serialization import read_tensor_file
from silotune.core.tensors import unflatten
from silotune.data.tasks import Task, read_task
from silotune.data.templates import CHAT
from silotune.errors import InputError
from silotune.evaluation.instance_vectors import READ
from silotune.evaluation.untouched import without_training
from silotune.methods.instance_weighting import INSTANCES
from silotune.methods.parts import Scope, names_with
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.start_adapter import FILE
from silotune.runs.build.coordinator import make_aggregation
from silotune.runs.build.model import make_context, run_backbone
from silotune.runs.build.resolve import resolve
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.model_file import MODELS, OWN_FILE, check_weights, recorded_files
from silotune.runs.model_folder import write_models
from silotune.runs.personal_model import check_precision
from silotune.runs.storage.readers import read_summary, read_versions
from silotune.runs.storage.run_folder import RunFolder
from silotune.training.coordinator import Coordinator
from silotune.training.federation import Federation
from silotune.training.silo import Silo, silos_without_rows


def import_run(path: Path) -> list[str]:
    """Write the folders `models/NAME/` of a finished run that has none; returns the silos' names."""
    federation = restore(path)
    write_models(path, federation, read_summary(path))
    return list(federation.tasks)


def restore(
    path: Path, backbone: Backbone | None = None, precision: str | None = None, device: str = "auto"
) -> Federation:
    """Return a finished run's federation at its best round; its silos have states, but no rows.

    Predictions need the folders `models/NAME` alone. This is for what looks at all parts, and for runs without them.
    Arguments as for `load_run`.
    """
    summary = read_summary(path)
    config, method = resolve(_configuration(path, summary, precision, device))
    if summary.get("engine") == "flower" and names_with(method.parts(), Scope.PRIVATE):  # initial ones are not trained
        raise InputError(f"{path}: is of a federation, whose private parts are in the silos' own folders")
    tasks, texts = _tasks(path, summary)
    backbone = run_backbone(config, method, backbone)
    check_weights(path, backbone, read_versions(path)["backbone"])
    context = make_context(config, method, tasks.values(), backbone)
    silos = silos_without_rows(method, tasks)
    ranks, shared = context.initial.ranks, context.initial.shared(silos.values())
    # without ranks and state nothing is computed, and an aggregation by a plug-in may be gone
    computed = any(shared.values()) and (ranks or may_have_state(config.aggregation.name))
    aggregation = make_aggregation(config.aggregation, len(silos)) if computed else uniform
    coordinator = Coordinator(shared, aggregation, ranks=ranks)
    malicious = tuple((summary.get("attack") or {}).get("malicious", ()))
    federation = Federation(config, context, silos, coordinator, tasks, texts, malicious=malicious)
    engine = InProcessEngine(federation, RunFolder(path))
    with damage_named(path / "summary.json"):
        best_round = int(summary["best_round"])
    if config.rounds:
        engine.load(engine.folder.checkpoints.load(best_round))
    else:
        without_training(federation)
    if context.prediction.weighting is not None:
        for silo in silos.values():
            _read_vectors(path, silo)
    return federation


def _configuration(path: Path, summary: dict[str, Any], precision: str | None, device: str) -> Config:
    config = load_resolved(path / "config.yaml")
    if summary.get("template") == CHAT:  # chosen by the silos' rows
        config = config.replace(head={"template": CHAT})
    elif config.head.writes and config.head.template is None:  # of a run before the model's own was the default
        config = config.replace(head={"template": PLAIN})
    changes: dict[str, Any] = {"device": device}
    if config.backbone.device_map is not None:
        changes["backbone"] = {"device_map": "auto" if device == "auto" else None}
    check_precision(precision)
    if precision is not None:
        changes["precision"] = {"name": precision}
    if config.start is not None:  # the run's own copy, or its own models: what is configured may be gone
        changes["start"] = str(path / FILE if (path / FILE).exists() else path)
    return config.replace(**changes)


def _tasks(path: Path, summary: dict[str, Any]) -> tuple[dict[str, Task], dict[str, int]]:
    """Return silo name → task, and silo name → number of texts in a row."""
    with damage_named(path / "summary.json"):
        entries = deepcopy(summary["tasks"])
        texts = {name: int(task.pop("texts")) for name, task in entries.items()}
        tasks = {name: read_task(task) for name, task in entries.items()}
        if unsafe := [name for name in tasks if not is_name(name)]:
            raise ValueError(f"silo {unsafe[0]!r} cannot be a name; allowed: {NAME_RULE}")
    return tasks, texts


def _read_vectors(path: Path, silo: Silo) -> None:
    """Read the vectors of a silo's rows; a run without models has them in files of their own."""
    if silo.state is None:
        return
    folder = path / MODELS / next(iter(silo.evaluations))
    if not (folder / OWN_FILE).exists():
        silo.instances = (READ, read_tensor_file(path / "instances", f"{silo.name}.safetensors", None))
        return
    with damage_named(folder / OWN_FILE):
        silo.instances = (READ, unflatten(read_tensor_file(folder, OWN_FILE, recorded_files(folder)))[INSTANCES])
