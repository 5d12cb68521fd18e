"""Open finished runs and score their tuned parts in each other's models (FedFAME, section 5.4.2).

"The delta parameters of PLM trained on one dataset are transferred to all other datasets": every part that a source's
prediction mixes takes the place of the target's; nothing is trained. The head is the target's own, so that tasks with
other labels can be compared, or the source's, where label counts agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Literal, NoReturn

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

WhoseHead = Literal["target", "source"]

Groups = dict[str, list["TransferModel"]]
"""Label of a matrix (method, tuner and further distinguishing settings) to its models, one per task and seed."""


@dataclass(frozen=True)
class TransferModel:
    """A finished run that has one model for one task: its parts at the best round, and sets of test rows.

    A score is the mean over the sets, in percent.
    """

    run: Run
    task: Task
    state: State
    tests: tuple[TokenizedRows, ...]

    @property
    def config(self) -> Config:
        """The run's configuration."""
        return self.run.federation.config

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.run.summary["seed"])

    @property
    def tuned(self) -> tuple[str, ...]:
        """Names of the parts that its prediction mixes."""
        return tuple(parts_in(self.run.federation.context.method.prediction().mix))

    def judge(self, state: State) -> float:
        """Return the score of a state on the model's test rows."""
        average = mean_ignoring_none(score(self.run.federation.context, state, rows) for rows in self.tests)
        assert average is not None, "a run without test rows has no score to be compared with"
        return average

    def majority(self) -> float | None:
        """Return the score of the best constant answer to its test rows; None without labels, or by loss."""
        if not self.task.labeled or self.task.metric in LOSS_METRICS:
            return None
        return mean_ignoring_none(constant_score(self.task, rows.labels) for rows in self.tests)


def open_models(
    folders: Sequence[Path], head: WhoseHead = "target", opened: Callable[[str], None] = lambda _: None
) -> Groups:
    """Open finished runs and group them by method and tuner; `opened` gets every run's name once it is loaded.

    If a task and seed would then occur twice, the learning rate and the partition's alpha distinguish groups, too.
    """
    backbones: dict[BackboneRequirements, Backbone] = {}
    models: list[TransferModel] = []
    for folder in folders:
        if read_summary(folder).get("engine") == "flower":
            _refuse(folder, "its test rows are on other machines")
        config = read_config(str(folder / "config.yaml"))
        requirements = BackboneRequirements.of(config, make_method(config))
        run = load_run(folder, backbones.get(requirements))
        backbones[requirements] = run.federation.backbone
        models.append(_model(run))
        opened(str(folder))
    groups = _group(models)
    for label, group in groups.items():
        _check_grid(label, group)
        for model in group[1:]:
            _check_alike(group[0], model, head)
        if not any(_readable(*pair, head) for pair in permutations(group, 2)):
            raise InputError(
                f"transfer.head=source: {label} has no two tasks that one head reads (equally many labels, and not the "
                "backbone's own vocabulary); allowed: target"
            )
    return groups


def _refuse(folder: Path, reason: str) -> NoReturn:
    raise InputError(
        f"{folder}: {reason}; transfer takes runs with one task, one model for it (e.g. method=fedavg "
        "head.scope=shared) and its test rows here"
    )


def _model(run: Run) -> TransferModel:
    """Return the run's only model, with its test rows; rows shared by silos are there once."""
    federation, context = run.federation, run.federation.context
    tasks, prediction = {task.name: task for task in federation.tasks.values()}, context.method.prediction()
    if len(tasks) > 1:
        _refuse(run.folder, f"holds {len(tasks)} tasks ({', '.join(sorted(tasks))})")
    parts = {name: context.parts[name] for name in (*parts_in(prediction.mix), *heads_of(prediction.head))}
    private = [name for name, part in parts.items() if part.scope is Scope.PRIVATE and _has_tensors(part.module)]
    if private and len(federation.silos) > 1:
        _refuse(run.folder, f"each of its {len(federation.silos)} silos predicts with its own {' and '.join(private)}")
    if run.summary["average"] is None:
        _refuse(run.folder, "its summary has no test score")
    try:
        silos = load_silos(federation.config)
    except InputError as error:
        raise InputError(f"{run.folder}: {error}") from error
    now = {silo.name: len(silo.splits.test) for silo in silos}
    then = {name: silo["rows"]["test"] for name, silo in run.silos.items()}
    for name in sorted(now.keys() | then):
        if now.get(name) != then.get(name):
            numbers = f"{now.get(name, 'no')} test rows now, {then.get(name, 'none')} when it ran"
            _refuse(run.folder, f"its data has changed (silo {name!r}: {numbers})")
    tokenize = context.method.setting.head.row_tokenizer(context.backbone, federation.config.train.max_length)
    tests = {id(silo.splits.test): (silo.task, silo.splits.test) for silo in silos}
    state = current_model_state(federation, next(iter(federation.silos.values())))
    return TransferModel(run, next(iter(tasks.values())), state, tuple(tokenize(*each) for each in tests.values()))


def _has_tensors(module: object) -> bool:
    return bool(getattr(module, "has_tensors", True))


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


def _check_grid(label: str, models: Sequence[TransferModel]) -> None:
    """Check that there is one run for each task and seed, of two tasks or more."""
    seeds: dict[str, list[int]] = {}
    for model in models:
        seeds.setdefault(model.task.name, []).append(model.seed)
    distinct = set(map(tuple, map(sorted, seeds.values())))
    if len(seeds) < 2 or len(distinct) > 1 or any(len(set(each)) < len(each) for each in seeds.values()):
        runs = "; ".join(f"{task} with seed {', '.join(map(str, each))}" for task, each in seeds.items())
        raise InputError(f"transfer: {label} has {runs}; it needs one run for each task and seed, of 2 tasks or more")


def _check_alike(first: TransferModel, model: TransferModel, head: WhoseHead) -> None:
    """Check that two runs have the same backbone and tuner, and the same head if the source's is used."""
    sections = ("tuner", "head") if head == "source" else ("tuner",)

    def facts(model: TransferModel) -> dict[str, object]:
        backbone = model.run.federation.backbone
        options = {section: getattr(model.config, section).model_dump() for section in sections}
        named = {f"{section}.{key}": value for section in sections for key, value in options[section].items()}
        return {"backbone": f"{backbone.name} ({backbone.fingerprint[:8]})"} | named | {"mix": ", ".join(model.tuned)}

    here, there = facts(model), facts(first)
    for key in here | there:
        if here.get(key) != there.get(key):
            raise InputError(
                f"{model.run.folder}: {key} is {here.get(key)}, in {first.run.folder} it is {there.get(key)}; transfer "
                f"takes runs with the same backbone and {' and '.join(sections)}"
            )


def _readable(source: TransferModel, target: TransferModel, head: WhoseHead) -> bool:
    """Return whether the chosen head can read the target's labels."""
    alike = (source.task.kind, source.task.outputs) == (target.task.kind, target.task.outputs)
    return head == "target" or (alike and source.run.federation.method.setting.head.has_tensors)


def exchange(
    models: Sequence[TransferModel], head: WhoseHead = "target"
) -> Iterator[tuple[TransferModel, TransferModel, float]]:
    """Yield source, target and the score of the source's tuned parts on the target's task, of the same seed.

    Pairs whose labels the source's head cannot read have no score.
    """
    for target in models:
        for source in models:
            if source.seed == target.seed and (source is target or _readable(source, target, head)):
                yield source, target, target.judge(transferred(source, target, head))


def transferred(source: TransferModel, target: TransferModel, head: WhoseHead = "target") -> State:
    """Replace the target's tuned parts by the source's, and its head too if `head` asks for the source's."""
    state = target.state | {name: source.state[name] for name in source.tuned}
    if head == "target":
        return state
    before, after = f"{source.task.name}.", f"{target.task.name}."  # a head's tensors begin with its task's name

    def renamed(tensors: Tensors) -> Tensors:
        return {after + key.removeprefix(before): each for key, each in tensors.items() if key.startswith(before)}

    heads = heads_of(source.run.federation.context.method.prediction().head)
    return state | {name: renamed(source.state.get(name, {})) for name in heads}
