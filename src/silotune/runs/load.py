"""`load_run` opens a finished run without its rows: summary and all silos' models; `load_model`, one silo's."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from silotune.config import Config, load_resolved
from silotune.config.backbone import PrecisionConfig
from silotune.config.validators import NAME_RULE, is_name
from silotune.core.tensors import State, Tensors, unflatten
from silotune.data.tasks import Task, read_task
from silotune.data.templates import CHAT
from silotune.errors import InputError, unknown_name_error
from silotune.evaluation.instance_vectors import read_instances
from silotune.methods import Method
from silotune.methods.parts import Scope, names_with
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.start_adapter import FILE
from silotune.runs.build.model import make_context, run_backbone
from silotune.runs.build.resolve import make_method, use_this_machine, with_options, with_template
from silotune.runs.personal_model import PersonalModel
from silotune.runs.storage.checkpoints import Checkpoint, Checkpoints, load_silo, validated_state
from silotune.runs.storage.readers import read_summary, read_versions
from silotune.training.context import TrainingContext
from silotune.training.silo import silos_without_rows

if TYPE_CHECKING:
    from silotune.runs.run_result import Run


def load_run(
    folder: str | Path, backbone: Backbone | None = None, precision: str | None = None, device: str = "auto"
) -> Run:
    """Open a finished run at its best round: its summary, and every silo's personalized model.

    Args:
        folder: the run folder.
        backbone: the run's backbone, if it is loaded already.
        precision: load the backbone in this precision instead of the run's.
        device: load it onto this device, as the key `device`; the run's own may be missing here.
    """
    # Only here: one silo's model needs neither an engine nor a coordinator.
    from silotune.aggregation import issues_by_silo, uniform
    from silotune.runs.build.aggregation import make_aggregation
    from silotune.runs.engines.in_process import InProcessEngine
    from silotune.runs.run_result import Run
    from silotune.runs.storage.run_folder import RunFolder
    from silotune.training.coordinator import Coordinator
    from silotune.training.federation import Federation

    finished = _FinishedRun.read(Path(folder), precision, device)
    config, tasks = finished.config, finished.tasks
    context = finished.build_model(backbone)
    silos = silos_without_rows(context.method, tasks)
    ranks, shared = context.initial.ranks, context.initial.shared(silos.values())
    # where all silos receive the same nothing is computed, and an aggregation by a plug-in may be gone
    computed = any(shared.values()) and (ranks or issues_by_silo(config.aggregation.name))
    aggregation = make_aggregation(config.aggregation, len(silos)) if computed else uniform
    coordinator = Coordinator(shared, aggregation, config.seed, ranks=ranks)
    malicious = _malicious(finished)
    federation = Federation(config, context, silos, coordinator, tasks, finished.texts, malicious=malicious)
    InProcessEngine(federation, RunFolder(finished.path)).load(finished.best_checkpoint())
    read_instances(finished.path, context, silos.values())
    return Run(finished.path, finished.summary, federation)


def load_model(
    folder: str | Path, silo: str, backbone: Backbone | None = None, precision: str | None = None
) -> PersonalModel:
    """Open one silo's personalized model of a finished run; the files of other silos are not opened.

    Args:
        folder: the run folder.
        silo: the silo's name.
        backbone: the run's backbone, if it is loaded already.
        precision: load the backbone in this precision instead of the run's.
    """
    finished = _FinishedRun.read(Path(folder), precision)
    if silo not in finished.tasks:
        raise unknown_name_error("silo", silo, finished.tasks)
    context = finished.build_model(backbone)
    task = finished.tasks[silo]
    # a centralized method has one training silo for all
    (owner,) = silos_without_rows(
        context.method, finished.tasks if context.method.centralized else {silo: task}
    ).values()
    best = finished.best_checkpoint()
    shared, kept = _read_shared(finished.checkpoints, best, context.initial.shared([owner]))
    if kept:
        from silotune.aggregation import SiloAggregation
        from silotune.runs.build.aggregation import make_aggregation
        from silotune.training.broadcasts import Broadcasts

        made = make_aggregation(finished.config.aggregation, len(finished.tasks))
        assert isinstance(made, SiloAggregation), "no other one keeps anything"
        made.state = kept
        shared = Broadcasts(shared, aggregation=made).state(silo)
    if silo in context.initial.ranks and any(shared.values()):
        from silotune.aggregation import mixing_ranks
        from silotune.runs.build.aggregation import make_aggregation
        from silotune.training.broadcasts import Broadcasts

        aggregation = mixing_ranks(
            make_aggregation(finished.config.aggregation, len(finished.tasks)), context.initial.ranks
        )
        shared = Broadcasts(shared, context.initial.ranks, aggregation).state(silo)
    load_silo(finished.checkpoints, best, context, owner)
    read_instances(finished.path, context, [owner])
    return PersonalModel(context, owner, shared, task, finished.texts[silo])


def _read_shared(checkpoints: Checkpoints, checkpoint: Checkpoint, expected: State) -> tuple[State, Tensors]:
    """Return a checkpoint's shared parts, and what an aggregation keeps that issues silos' own tensors."""
    with validated_state(checkpoint.shared, expected) as check:
        tensors = checkpoints.read(checkpoint.shared)

        def group(prefix: str) -> Tensors:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        shared, kept = unflatten(group("shared/")), group("aggregation/")
        check(shared)
    return {name: shared.get(name, {}) for name in expected}, kept


@dataclass(frozen=True)
class _FinishedRun:
    """The settings of a finished run, as its folder says them.

    Args:
        path: the run folder.
        checkpoints: its checkpoints.
        summary: `summary.json`.
        config: the run's configuration.
        method: the configured method.
        tasks: silo name → task.
        texts: silo name → number of texts in a row.
    """

    path: Path
    checkpoints: Checkpoints
    summary: dict[str, Any]
    config: Config
    method: Method
    tasks: dict[str, Task]
    texts: dict[str, int]

    @classmethod
    def read(cls, path: Path, precision: str | None, device: str = "auto") -> _FinishedRun:
        """Read summary and configuration."""
        summary = read_summary(path)
        config = load_resolved(path / "config.yaml")
        if summary.get("template") == CHAT:  # chosen by the silos' rows
            config = with_template(config, CHAT)
        method = make_method(config)
        config = with_options(config, method)
        _check_private_parts(path, summary, method)
        elsewhere: dict[str, Any] = {"device": device}  # this machine may not have the run's
        if config.backbone.device_map is not None:
            device_map = "auto" if device == "auto" else None
            elsewhere["backbone"] = config.backbone.model_copy(update={"device_map": device_map})
        config = config.model_copy(update=elsewhere)
        if precision is not None:
            if precision not in (names := get_args(PrecisionConfig.model_fields["name"].annotation)):
                raise unknown_name_error("precision", precision, names)
            config = config.model_copy(update={"precision": config.precision.model_copy(update={"name": precision})})
        return cls(path, Checkpoints(path / "checkpoints"), summary, config, method, *_tasks(path, summary))

    def build_model(self, backbone: Backbone | None) -> TrainingContext:
        """Build the model over the run's backbone."""
        path, config = self.path, use_this_machine(self.config)
        if config.start is not None:  # the run's own copy: the configured file may be gone
            config = config.model_copy(update={"start": str(path / FILE)})
        backbone = run_backbone(config, self.method, backbone)
        if backbone.fingerprint != read_versions(path)["backbone"]:
            raise InputError(
                f"{path}: was made with another backbone than {config.backbone.name!r} is now (its weights differ)"
            )
        return make_context(config, self.method, self.tasks.values(), backbone)

    def best_checkpoint(self) -> Checkpoint:
        """Return the manifest of the best round."""
        try:
            return self.checkpoints.load(int(self.summary["best_round"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{self.path}/summary.json: damaged (no best_round)") from error


def _check_private_parts(path: Path, summary: dict[str, Any], method: Method) -> None:
    """Refuse a folder without the private parts: initial parts must not pass for trained ones."""
    if summary.get("engine") != "flower":  # `Flower.label` in distributed/coordinator/engine.py
        return
    private = names_with(method.parts(), Scope.PRIVATE)
    if private:
        raise InputError(
            f"{path}: is the coordinator's folder of a federation; the private parts ({', '.join(private)}) are in the "
            "silos' own folders"
        )


def _tasks(path: Path, summary: dict[str, Any]) -> tuple[dict[str, Task], dict[str, int]]:
    """Return silo name → task, and silo name → number of texts in a row."""
    try:
        entries = deepcopy(summary["tasks"])
        texts = {name: int(task.pop("texts")) for name, task in entries.items()}
        tasks = {name: read_task(task) for name, task in entries.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path}/summary.json: does not say the silos' tasks; `silotune run {path}/config.yaml --out {path} "
            "--resume` writes it anew"
        ) from error
    unsafe = [name for name in tasks if not is_name(name)]
    if unsafe:
        raise InputError(f"{path}/summary.json: damaged (silo {unsafe[0]!r} cannot be a name; allowed: {NAME_RULE})")
    return tasks, texts


def _malicious(finished: _FinishedRun) -> tuple[str, ...]:
    """Return the names of the attacking silos."""
    try:
        return tuple((finished.summary.get("attack") or {}).get("malicious", ()))
    except (TypeError, AttributeError) as error:
        raise InputError(f"{finished.path}/summary.json: damaged (attack)") from error
