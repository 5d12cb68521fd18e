"""Finished runs opened for a transfer: one model for one task each, grouped by what may be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from silotune.config import Config
from silotune.data.loading import load_silos
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.evaluation.scores import state_of
from silotune.evaluation.transfer import TransferModel, WhoseHead, check_alike
from silotune.methods.parts import Scope
from silotune.models.backbone.backbone import Backbone
from silotune.models.heads import Head
from silotune.runs.build.resolve import BackboneRequirements, make_method, read_config
from silotune.runs.load import load_run
from silotune.runs.run import Run
from silotune.runs.storage.readers import read_summary, read_versions
from silotune.training.federation import Federation

Groups = dict[str, list[TransferModel]]
"""What a matrix is of (method, tuner, and what else tells two apart) → its models, one per task and seed."""


def open_models(
    folders: Sequence[Path], head: WhoseHead = "target", opened: Callable[[str], None] = lambda _: None
) -> Groups:
    """Open finished runs, and group them.

    Runs of one method and tuner belong together. Where a task and seed would then come twice, the learning rate and the
    partition's alpha tell groups apart too.

    Args:
        folders: run folders.
        head: whose head will read labels.
        opened: called with every run's name once it is loaded.

    Raises:
        InputError: an unfinished run, another backbone, a run without one model for one task, or groups that cannot be
            compared; before anything is judged.
    """
    _distinct(folders)
    for folder in folders:
        read_summary(folder)
    _one_backbone(folders)
    backbones: dict[BackboneRequirements, Backbone] = {}
    models = []
    for folder in folders:
        config = read_config(str(folder / "config.yaml"))
        needs = BackboneRequirements.of(config, make_method(config))
        run = load_run(folder, backbones.get(needs))
        backbones[needs] = run.federation.backbone
        models.append(_model(run))
        opened(str(folder))
    groups = _grouped(models)
    for label, found in groups.items():
        _check(label, found, head)
    return groups


def _distinct(folders: Sequence[Path]) -> None:
    seen: dict[Path, Path] = {}
    for folder in folders:
        if (first := seen.setdefault(folder.resolve(), folder)) is not folder:
            raise InputError(f"transfer: {folder} is given twice (also as {first})")


def _one_backbone(folders: Sequence[Path]) -> None:
    names = {folder: read_config(str(folder / "config.yaml")).backbone for folder in folders}
    first = folders[0]
    for folder in folders[1:]:
        if read_versions(folder)["backbone"] != read_versions(first)["backbone"]:
            raise InputError(
                f"{folder}: was made with another backbone ({names[folder]}) than {first} ({names[first]}); transfer "
                "takes runs over one backbone"
            )


def _model(run: Run) -> TransferModel:
    """The run's one model, with the test rows it was judged on.

    Raises:
        InputError: several tasks or models, or data that is not what it was.
    """
    federation, name = run.federation, str(run.folder)
    tasks = sorted({task.name for task in federation.tasks.values()})
    if len(tasks) > 1:
        raise InputError(f"{name}: holds {len(tasks)} tasks ({', '.join(tasks)}); transfer takes one run per task")
    private = _private_parts(federation)
    if private and len(federation.silos) > 1:
        raise InputError(
            f"{name}: each of its {len(federation.silos)} silos predicts with its own {' and '.join(private)}; "
            "transfer takes runs with one model, e.g. method=fedavg head.scope=shared, fedfame or centralised"
        )
    if run.summary["average"] is None:
        raise InputError(f"{name}: its summary has no test score to compare with (silos kept theirs to themselves)")
    state = state_of(federation, next(iter(federation.silos.values())))
    task = next(iter(federation.tasks.values()))
    seed, reported = int(run.summary["seed"]), float(run.summary["average"])
    return TransferModel(name, federation, task, seed, state, _test_rows(run), reported)


def _private_parts(federation: Federation) -> list[str]:
    """The parts that a prediction uses and that silos keep to themselves."""
    parts, prediction = federation.context.parts, federation.context.method.prediction()
    used = [*prediction.mix, prediction.head]
    return [
        name for name in used if parts[name].scope is Scope.PRIVATE and getattr(parts[name].module, "has_tensors", True)
    ]


def _test_rows(run: Run) -> tuple[TokenizedRows, ...]:
    """The test rows of the run's data, read anew; those that silos share come once."""
    config = run.federation.config
    try:
        silos = load_silos(config)
    except InputError as error:
        raise InputError(f"{run.folder}: {error}") from error
    now = {silo.name: len(silo.splits.test) for silo in silos}
    untold = "an unknown number"  # the silo shared its scores alone
    then = {name: (silo.get("rows") or {}).get("test", untold) for name, silo in run.silos.items()}
    for name in sorted({*now, *then}):
        if name not in now or then.get(name) not in (now[name], untold):
            raise InputError(
                f"{run.folder}: its data has changed (silo {name!r}: {now.get(name, 'no')} test rows now, "
                f"{then.get(name, 'none')} when it ran)"
            )
    training = run.federation.context
    tokenize = training.method.setting.head.row_tokenizer(training.backbone, config.train.max_length)
    distinct = {id(silo.splits.test): silo for silo in silos}
    return tuple(tokenize(silo.task, silo.splits.test) for silo in distinct.values())


def _grouped(models: Sequence[TransferModel]) -> Groups:
    plain = _by(models, lambda config: f"{config.method.name}, {config.tuner.name}")
    groups: Groups = {}
    for label, found in plain.items():
        twice = [pair for pair, number in Counter((m.task.name, m.seed) for m in found).items() if number > 1]
        groups |= _by(found, _fully) if twice else {label: found}
    return groups


def _by(models: Sequence[TransferModel], name: Callable[[Config], str]) -> Groups:
    groups: Groups = {}
    for model in models:
        groups.setdefault(name(model.federation.config), []).append(model)
    return groups


def _fully(config: Config) -> str:
    alpha = alpha_of(config)
    skew = "" if alpha is None else f", α {alpha:g}"
    return f"{config.method.name}, {config.tuner.name}, lr {config.train.lr:g}{skew}"


def alpha_of(config: Config) -> float | None:
    """The partition's alpha; None where it has none, or where nothing is left of it."""
    skewed = config.partition.name in ("dirichlet", "quantity") and config.method.name != "centralised"
    return config.partition.alpha if skewed else None


def mixed(label: str, models: Sequence[TransferModel]) -> str | None:
    """In which of the settings that groups may mix these models differ, as one line; None where they are alike."""
    asked: dict[str, Callable[[Config], float | None]] = {
        "train.lr": lambda config: config.train.lr,
        "partition.alpha": alpha_of,
    }
    differing = []
    for key, of in asked.items():
        values: dict[str, dict[str, None]] = {}
        for model in models:
            value = of(model.federation.config)
            values.setdefault(model.task.name, {})["none" if value is None else f"{value:g}"] = None
        if len({value for found in values.values() for value in found}) > 1:
            told = ", ".join(f"{task} {'/'.join(found)}" for task, found in values.items())
            differing.append(f"{key} ({told})")
    return f"{label}: the runs differ in {' and '.join(differing)}" if differing else None


def _check(label: str, models: Sequence[TransferModel], head: WhoseHead) -> None:
    """Refuse a group that gives no matrix."""
    seeds: dict[str, dict[int, TransferModel]] = {}
    for model in models:
        other = seeds.setdefault(model.task.name, {}).setdefault(model.seed, model)
        if other is not model:
            raise InputError(
                f"transfer: {other.name} and {model.name} are both {label} on {model.task.name} with seed "
                f"{model.seed}; give one of them"
            )
    if len(seeds) < 2:
        raise InputError(f"transfer: {label} has runs of one task only ({models[0].task.name}); at least 2 are needed")
    first = models[0]
    for model in models[1:]:
        if set(seeds[model.task.name]) != set(seeds[first.task.name]):
            raise InputError(
                f"transfer: {label}: {_seeds(seeds, model)}, but {_seeds(seeds, first)}; every task needs the same "
                "seeds"
            )
        _same_options(first, model, head)
        check_alike(first, model)


def _seeds(seeds: Mapping[str, Mapping[int, TransferModel]], model: TransferModel) -> str:
    return f"{model.task.name} has seed {', '.join(map(str, sorted(seeds[model.task.name])))}"


def _same_options(one: TransferModel, other: TransferModel, head: WhoseHead) -> None:
    """A tuner acts as the target's options say, a head reads as its own do: the source's must be the same."""
    first, second = one.federation.config, other.federation.config
    pairs = {"tuner": (first.tuner.model_dump(), second.tuner.model_dump())}
    if head == "source":
        pairs["head"] = (first.head.model_dump(), second.head.model_dump())
    for section, (mine, theirs) in pairs.items():
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                raise InputError(
                    f"{other.name}: {section}.{key} is {theirs.get(key)}, in {one.name} it is {mine.get(key)}; "
                    f"transfer takes runs with the same {section}"
                )
    for model in (one, other):
        module = model.federation.context.parts[model.head].module
        if head == "source" and isinstance(module, Head) and not module.has_tensors:
            raise InputError(
                f"transfer.head=source: {model.name} reads labels with the backbone's own vocabulary; allowed: target"
            )
