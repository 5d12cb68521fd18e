"""Finished runs opened again: from the run folder and the backbone alone, without data and without training."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from silotune.config import Config
from silotune.config.attack import AttackConfig
from silotune.config.privacy import PrivacyConfig
from silotune.config.uplink import UplinkConfig
from silotune.data.tasks import SiloData, Splits, Task
from silotune.errors import InputError
from silotune.evaluation.instance_vectors import read_instances
from silotune.methods.parts import Scope, names_with
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.initial_adapter import FILE
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import make_method, read_config
from silotune.runs.engines.in_process import InProcess
from silotune.runs.run import Run
from silotune.runs.storage.readers import read_summary, read_versions
from silotune.runs.storage.run_folder import RunFolder


def load_run(folder: str | Path, backbone: Backbone | None = None, precision: str | None = None) -> Run:
    """A finished run at its best round: its summary, and every silo's personalized model.

    Args:
        folder: the run folder.
        backbone: the run's backbone, where it is loaded already.
        precision: another one than the run's to load the backbone in.

    Raises:
        InputError: no finished run there, a damaged folder, a backbone whose weights have changed, or a federation's
            coordinator whose silos keep their private parts.
    """
    path = Path(folder)
    summary = read_summary(path)
    config = read_config(str(path / "config.yaml"))
    _check_whole(path, summary, config)
    if precision is not None:
        config = config.model_copy(update={"precision": precision})
    tasks, texts = _tasks(path, summary)
    data = [SiloData(name, task, Splits()) for name, task in tasks.items()]
    federation = build(_self_contained(config, path), backbone, data)
    if federation.backbone.fingerprint != read_versions(path)["backbone"]:
        raise InputError(f"{path}: was made with another backbone than {config.backbone!r} is now (its weights differ)")
    federation.config, federation.texts = config, texts
    federation.malicious = tuple((summary.get("attack") or {}).get("malicious", ()))
    run_folder = RunFolder(path)
    try:
        best = run_folder.load(int(summary["best_round"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}/summary.json: damaged (no best_round)") from error
    InProcess(federation, run_folder).load(best)
    read_instances(path, federation.context, federation.silos.values())
    return Run(path, summary, federation)


def _check_whole(path: Path, summary: dict[str, Any], config: Config) -> None:
    """Refuse a folder without the private parts: what began with the seed must not pass for what a silo trained."""
    if summary.get("engine") != "flower":  # federation.engine.Flower.label; Flower itself need not be installed here
        return
    private = names_with(make_method(config).parts(), Scope.PRIVATE)
    if private:
        raise InputError(
            f"{path}: is the coordinator's folder of a federation; the private parts ({', '.join(private)}) are in the "
            "silos' own folders"
        )


def _tasks(path: Path, summary: dict[str, Any]) -> tuple[dict[str, Task], dict[str, int]]:
    """Per silo: its task, and how many texts a row has."""
    try:
        found = deepcopy(summary["tasks"])
        texts = {name: int(task.pop("texts")) for name, task in found.items()}
        return {name: Task(**(task | {"labels": tuple(task["labels"])})) for name, task in found.items()}, texts
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}/summary.json: does not say the silos' tasks; `silotune run {path}/config.yaml --out {path} "
            "--resume` writes it anew"
        ) from error


def _self_contained(config: Config, path: Path) -> Config:
    """The run's own copy of what it began as: what `start` names may be gone by now.

    Nothing is sent or noised any more, and nothing poisoned: the summary says whose rows were, which are not here.
    """
    update: dict[str, object] = {
        "uplink": UplinkConfig(),
        "aggregation": config.aggregation.model_copy(update={"noise_multiplier": None}),
        "privacy": PrivacyConfig(),
        "attack": AttackConfig(),
    }
    if config.start is not None:
        update["start"] = str(path / FILE)
    return config.model_copy(update=update)
