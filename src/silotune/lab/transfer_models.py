"""Open finished runs and score their tuned parts in each other's models (FedFAME, section 5.4.2).

"The delta parameters of PLM trained on one dataset are transferred to all other datasets": every part that a source's
prediction mixes takes the place of the target's; nothing is trained. The head is the target's own, so that tasks with
other labels can be compared, or the source's, where label counts agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from silotune.config import Config
from silotune.core.numeric import mean_ignoring_none
from silotune.core.tensors import State, Tensors
from silotune.data.loading import load_silos
from silotune.data.scores import constant_score
from silotune.data.tasks import LOSS_METRICS, Task
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.evaluation.federation_scores import current_model_state
from silotune.evaluation.predict import score
from silotune.methods import is_centralized
from silotune.methods.parts import Scope
from silotune.methods.step import heads_of
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.mixing import parts_in
from silotune.runs.build.model import BackboneRequirements
from silotune.runs.build.resolve import make_method, read_config
from silotune.runs.run_result import Run, load_run
from silotune.runs.storage.readers import read_summary
from silotune.training.federation import Federation

WhoseHead = Literal["target", "source"]

Groups = dict[str, list["TransferModel"]]
"""Label of a matrix (method, tuner and further distinguishing settings) to its models, one per task and seed."""


@dataclass(frozen=True)
class TransferModel:
    """A finished run that has one model for one task.

    `name` stands in messages, `state` has the parts at the best round, `reported` is the test score in the run's
    summary. A score is the mean over the sets of test rows, `tests`.
    """

    name: str
    federation: Federation
    task: Task
    seed: int
    state: State
    tests: tuple[TokenizedRows, ...]
    reported: float

    @property
    def tuned(self) -> tuple[str, ...]:
        """Names of the parts that its prediction mixes."""
        return tuple(parts_in(self.federation.context.method.prediction().mix))

    def judge(self, state: State) -> float:
        """Return the score of a state on the model's test rows, in percent."""
        average = mean_ignoring_none(score(self.federation.context, state, rows) for rows in self.tests)
        assert average is not None, "a run without test rows has no score to be compared with"
        return average

    @property
    def config(self) -> Config:
        """The run's configuration."""
        return self.federation.config

    @cached_property
    def majority(self) -> float | None:
        """The score of the best constant answer to its test rows; None without labels, or by loss."""
        if not self.task.labeled or self.task.metric in LOSS_METRICS:
            return None
        return mean_ignoring_none(constant_score(self.task, rows.labels) for rows in self.tests)


def open_models(
    folders: Sequence[Path], head: WhoseHead = "target", opened: Callable[[str], None] = lambda _: None
) -> Groups:
    """Open finished runs and group them by method and tuner; `opened` gets every run's name once it is loaded.

    If a task and seed would then occur twice, the learning rate and the partition's alpha distinguish groups, too.
    """
    for folder in folders:
        if read_summary(folder).get("engine") == "flower":
            raise InputError(
                f"{folder}: of a federation over machines, whose rows stay there; transfer needs them here"
            )
    backbones: dict[BackboneRequirements, Backbone] = {}
    models: list[TransferModel] = []
    for folder in folders:
        config = read_config(str(folder / "config.yaml"))
        requirements = BackboneRequirements.of(config, make_method(config))
        run = load_run(folder, backbones.get(requirements))
        backbones[requirements] = run.federation.backbone
        models.append(_model(run))
        first, backbone = models[0].federation.backbone, run.federation.backbone
        if backbone.fingerprint != first.fingerprint:
            raise InputError(
                f"{folder}: was made with another backbone ({backbone.name}) than {folders[0]} ({first.name}); "
                "transfer takes runs over one backbone"
            )
        opened(str(folder))
    groups = _group(models)
    for label, group in groups.items():
        _check_group(label, group, head)
    return groups


def _model(run: Run) -> TransferModel:
    """Return the run's only model, with its test rows."""
    federation, folder = run.federation, str(run.folder)
    tasks = sorted({task.name for task in federation.tasks.values()})
    if len(tasks) > 1:
        raise InputError(f"{folder}: holds {len(tasks)} tasks ({', '.join(tasks)}); transfer takes one run per task")
    parts, prediction = federation.context.parts, federation.context.method.prediction()
    private = [
        name
        for name in (*parts_in(prediction.mix), *heads_of(prediction.head))
        if parts[name].scope is Scope.PRIVATE and getattr(parts[name].module, "has_tensors", True)
    ]
    if private and len(federation.silos) > 1:
        raise InputError(
            f"{folder}: each of its {len(federation.silos)} silos predicts with its own {' and '.join(private)}; "
            "transfer takes runs with one model, e.g. method=fedavg head.scope=shared, fedfame or centralised"
        )
    if run.summary["average"] is None:
        raise InputError(f"{folder}: its summary has no test score to compare with")
    state = current_model_state(federation, next(iter(federation.silos.values())))
    task = next(iter(federation.tasks.values()))
    seed, reported = int(run.summary["seed"]), float(run.summary["average"])
    return TransferModel(folder, federation, task, seed, state, _test_rows(run), reported)


def _test_rows(run: Run) -> tuple[TokenizedRows, ...]:
    """Read the test rows of the run's data again; rows shared by silos are returned once."""
    config = run.federation.config
    try:
        silos = load_silos(config)
    except InputError as error:
        raise InputError(f"{run.folder}: {error}") from error
    rows_now = {silo.name: len(silo.splits.test) for silo in silos}
    rows_then = {name: silo["rows"]["test"] for name, silo in run.silos.items()}
    for name in sorted({*rows_now, *rows_then}):
        if rows_then.get(name) != rows_now.get(name):
            raise InputError(
                f"{run.folder}: its data has changed (silo {name!r}: {rows_now.get(name, 'no')} test rows now, "
                f"{rows_then.get(name, 'none')} when it ran)"
            )
    training = run.federation.context
    tokenize = training.method.setting.head.row_tokenizer(training.backbone, config.train.max_length)
    return tuple(tokenize(silo.task, silo.splits.test) for silo in {id(s.splits.test): s for s in silos}.values())


def _group(models: Sequence[TransferModel]) -> Groups:
    """Group models by method and tuner; also by rate and skew if a task and seed would occur twice."""
    short = [f"{model.config.method.name}, {model.config.tuner.name}" for model in models]
    keys = [(label, model.task.name, model.seed) for label, model in zip(short, models, strict=True)]
    ambiguous = {label for (label, *_), number in Counter(keys).items() if number > 1}
    groups: Groups = {}
    for label, model in zip(short, models, strict=True):
        if label in ambiguous:
            alpha = alpha_of(model.config)
            label += f", lr {model.config.train.lr:g}" + ("" if alpha is None else f", α {alpha:g}")
        groups.setdefault(label, []).append(model)
    return groups


def alpha_of(config: Config) -> float | None:
    """Return the partition's alpha; None if it has none or the rows are pooled."""
    skewed = config.partition.name in ("dirichlet", "quantity") and not is_centralized(config.method.name)
    return config.partition.alpha if skewed else None


def describe_differences(label: str, models: Sequence[TransferModel]) -> str | None:
    """Describe in one line the rates and skews in which the models of a group differ; None if they agree."""
    differing = []
    for key, read in {"train.lr": lambda config: config.train.lr, "partition.alpha": alpha_of}.items():
        values: dict[str, dict[str, None]] = {}
        for model in models:
            value = read(model.config)
            values.setdefault(model.task.name, {})["none" if value is None else f"{value:g}"] = None
        if len({value for of_task in values.values() for value in of_task}) > 1:
            details = ", ".join(f"{task} {'/'.join(of_task)}" for task, of_task in values.items())
            differing.append(f"{key} ({details})")
    return f"{label}: the runs differ in {' and '.join(differing)}" if differing else None


def _check_group(label: str, models: Sequence[TransferModel], head: WhoseHead) -> None:
    """Check that a group gives a matrix: two tasks or more, the same seeds for each, the same options."""
    seeds: dict[str, dict[int, TransferModel]] = {}
    for model in models:
        earlier = seeds.setdefault(model.task.name, {}).setdefault(model.seed, model)
        if earlier is not model:
            raise InputError(
                f"transfer: {earlier.name} and {model.name} are both {label} on {model.task.name} with seed "
                f"{model.seed}; give one of them"
            )
    if len(seeds) < 2:
        raise InputError(f"transfer: {label} has runs of one task only ({models[0].task.name}); at least 2 are needed")
    first = models[0]
    for model in models[1:]:
        if set(seeds[model.task.name]) != set(seeds[first.task.name]):
            one, other = (
                f"{task} has seed {', '.join(map(str, sorted(seeds[task])))}"
                for task in (model.task.name, first.task.name)
            )
            raise InputError(f"transfer: {label}: {one}, but {other}; every task needs the same seeds")
        _check_same_options(first, model, head)
        if model.tuned != first.tuned:
            raise InputError(
                f"{model.name}: its tuned parts are {', '.join(model.tuned)}, those of {first.name} "
                f"{', '.join(first.tuned)}; transfer takes runs with the same tuner and options"
            )


def _check_same_options(model_a: TransferModel, model_b: TransferModel, head: WhoseHead) -> None:
    """Check that two runs have the same tuner options, and head options if the source's head is used."""
    for section in ("tuner", "head") if head == "source" else ("tuner",):
        options_a, options_b = (getattr(model.config, section).model_dump() for model in (model_a, model_b))
        for key in sorted(options_a.keys() | options_b.keys()):
            if options_a.get(key) != options_b.get(key):
                raise InputError(
                    f"{model_b.name}: {section}.{key} is {options_b.get(key)}, in {model_a.name} it is "
                    f"{options_a.get(key)}; transfer takes runs with the same {section}"
                )
    for model in (model_a, model_b):
        module = model.federation.method.setting.head
        if head == "source" and not module.has_tensors:
            raise InputError(
                f"transfer.head=source: {model.name} reads labels with the backbone's own vocabulary; allowed: target"
            )


@dataclass(frozen=True)
class TransferScore:
    """The score of one source on one target, in percent. `relative` is None if the target's own score is 0."""

    source: str
    target: str
    seed: int
    metric: str
    absolute: float
    relative: float | None


def exchange(models: Sequence[TransferModel], head: WhoseHead = "target") -> Iterator[TransferScore]:
    """Yield the score of every model's tuned parts on every task of the same seed, its own task first.

    Where the source's head reads the labels, pairs of different label counts have no score.
    """
    references: dict[str, float] = {}
    for target in models:
        sources = [source for source in models if source.seed == target.seed]
        for source in sorted(sources, key=lambda model: model is not target):  # its own comes first
            if head == "source" and (source.task.kind, source.task.outputs) != (target.task.kind, target.task.outputs):
                continue
            absolute = target.judge(transferred(source, target, head))
            if source is target:
                references[target.name] = absolute
            reference = references[target.name]
            relative = 100 * absolute / reference if reference else None
            yield TransferScore(source.task.name, target.task.name, target.seed, target.task.metric, absolute, relative)


def transferred(source: TransferModel, target: TransferModel, head: WhoseHead = "target") -> State:
    """Replace the target's tuned parts by the source's, and its head too if `head` asks for the source's."""
    state = target.state | {name: source.state[name] for name in source.tuned}
    if head == "target":
        return state
    before, after = f"{source.task.name}.", f"{target.task.name}."  # a head's tensors begin with its task's name

    def renamed(tensors: Tensors) -> Tensors:
        return {after + key.removeprefix(before): each for key, each in tensors.items() if key.startswith(before)}

    heads = heads_of(source.federation.context.method.prediction().head)
    return state | {name: renamed(source.state.get(name, {})) for name in heads}
