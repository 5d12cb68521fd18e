"""`open_models` opens finished runs for `lab/transfer_scores.py`, and groups those that are comparable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from silotune.config import Config
from silotune.data.loading import load_silos
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.evaluation.federation_scores import current_model_state
from silotune.lab.transfer_scores import TransferModel, WhoseHead, check_alike
from silotune.methods import is_centralized
from silotune.methods.head_mix import heads_of
from silotune.methods.parts import Scope
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.mixing import parts_in
from silotune.runs.build.model import BackboneRequirements
from silotune.runs.build.resolve import make_method, read_config
from silotune.runs.load import load_run
from silotune.runs.run_result import Run
from silotune.runs.storage.readers import read_summary
from silotune.training.federation import Federation

Groups = dict[str, list[TransferModel]]
"""Label of a matrix (method, tuner and further distinguishing settings) to its models, one per task and seed."""


def open_models(
    folders: Sequence[Path], head: WhoseHead = "target", opened: Callable[[str], None] = lambda _: None
) -> Groups:
    """Open finished runs and group them by method and tuner.

    If a task and seed would then occur twice, the learning rate and the partition's alpha distinguish groups, too.

    Args:
        folders: run folders.
        head: the run whose head will classify: `target` or `source`.
        opened: called with every run's name once it is loaded.
    """
    _check_distinct(folders)
    for folder in folders:
        read_summary(folder)
    backbones: dict[BackboneRequirements, Backbone] = {}
    first: Federation | None = None
    models = []
    for folder in folders:
        config = read_config(str(folder / "config.yaml"))
        requirements = BackboneRequirements.of(config, make_method(config))
        run = load_run(folder, backbones.get(requirements))
        backbones[requirements] = run.federation.backbone
        first = first or run.federation
        _check_backbone(folders[0], first, folder, run.federation)
        models.append(_model(run))
        opened(str(folder))
    groups = _group(models)
    for label, group in groups.items():
        _check_group(label, group, head)
    return groups


def _check_distinct(folders: Sequence[Path]) -> None:
    seen: dict[Path, Path] = {}
    for folder in folders:
        if (first := seen.setdefault(folder.resolve(), folder)) is not folder:
            raise InputError(f"transfer: {folder} is given twice (also as {first})")


def _check_backbone(first_folder: Path, first: Federation, folder: Path, federation: Federation) -> None:
    if federation.backbone.fingerprint != first.backbone.fingerprint:
        raise InputError(
            f"{folder}: was made with another backbone ({federation.backbone.name}) than {first_folder} "
            f"({first.backbone.name}); transfer takes runs over one backbone"
        )


def _model(run: Run) -> TransferModel:
    """Return the run's only model, with its test rows."""
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
    state = current_model_state(federation, next(iter(federation.silos.values())))
    task = next(iter(federation.tasks.values()))
    seed, reported = int(run.summary["seed"]), float(run.summary["average"])
    return TransferModel(name, federation, task, seed, state, _test_rows(run), reported)


def _private_parts(federation: Federation) -> list[str]:
    """Return the private parts that predictions use."""
    parts, prediction = federation.context.parts, federation.context.method.prediction()
    used = [*parts_in(prediction.mix), *heads_of(prediction.head)]
    return [
        name for name in used if parts[name].scope is Scope.PRIVATE and getattr(parts[name].module, "has_tensors", True)
    ]


def _test_rows(run: Run) -> tuple[TokenizedRows, ...]:
    """Read the test rows of the run's data again; rows shared by silos are returned once."""
    config = run.federation.config
    try:
        silos = load_silos(config)
    except InputError as error:
        raise InputError(f"{run.folder}: {error}") from error
    rows_now = {silo.name: len(silo.splits.test) for silo in silos}
    undisclosed = "an unknown number"  # the silo disclosed only its scores
    rows_then = {name: (silo.get("rows") or {}).get("test", undisclosed) for name, silo in run.silos.items()}
    for name in sorted({*rows_now, *rows_then}):
        if name not in rows_now or rows_then.get(name) not in (rows_now[name], undisclosed):
            raise InputError(
                f"{run.folder}: its data has changed (silo {name!r}: {rows_now.get(name, 'no')} test rows now, "
                f"{rows_then.get(name, 'none')} when it ran)"
            )
    training = run.federation.context
    tokenize = training.method.setting.head.row_tokenizer(training.backbone, config.train.max_length)
    distinct = {id(silo.splits.test): silo for silo in silos}
    return tuple(tokenize(silo.task, silo.splits.test) for silo in distinct.values())


def _group(models: Sequence[TransferModel]) -> Groups:
    short_groups = _group_by(models, lambda config: f"{config.method.name}, {config.tuner.name}")
    groups: Groups = {}
    for label, group in short_groups.items():
        duplicates = [pair for pair, number in Counter((m.task.name, m.seed) for m in group).items() if number > 1]
        groups |= _group_by(group, _detailed_label) if duplicates else {label: group}
    return groups


def _group_by(models: Sequence[TransferModel], name: Callable[[Config], str]) -> Groups:
    groups: Groups = {}
    for model in models:
        groups.setdefault(name(model.federation.config), []).append(model)
    return groups


def _detailed_label(config: Config) -> str:
    alpha = alpha_of(config)
    skew = "" if alpha is None else f", α {alpha:g}"
    return f"{config.method.name}, {config.tuner.name}, lr {config.train.lr:g}{skew}"


def alpha_of(config: Config) -> float | None:
    """Return the partition's alpha; None if it has none or the rows are pooled."""
    skewed = config.partition.name in ("dirichlet", "quantity") and not is_centralized(config.method.name)
    return config.partition.alpha if skewed else None


def describe_differences(label: str, models: Sequence[TransferModel]) -> str | None:
    """Describe in one line the settings in which models of a group differ; None if they agree.

    Args:
        label: label of the group.
        models: its models.
    """
    settings: dict[str, Callable[[Config], float | None]] = {
        "train.lr": lambda config: config.train.lr,
        "partition.alpha": alpha_of,
    }
    differing = []
    for key, read in settings.items():
        values: dict[str, dict[str, None]] = {}
        for model in models:
            value = read(model.federation.config)
            values.setdefault(model.task.name, {})["none" if value is None else f"{value:g}"] = None
        if len({value for task_values in values.values() for value in task_values}) > 1:
            details = ", ".join(f"{task} {'/'.join(task_values)}" for task, task_values in values.items())
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
            raise InputError(
                f"transfer: {label}: {_seeds(seeds, model)}, but {_seeds(seeds, first)}; every task needs the same "
                "seeds"
            )
        _check_same_options(first, model, head)
        check_alike(first, model)


def _seeds(seeds: Mapping[str, Mapping[int, TransferModel]], model: TransferModel) -> str:
    return f"{model.task.name} has seed {', '.join(map(str, sorted(seeds[model.task.name])))}"


def _check_same_options(model_a: TransferModel, model_b: TransferModel, head: WhoseHead) -> None:
    """Check that two runs have the same tuner options, and head options if the source's head is used."""
    config_a, config_b = model_a.federation.config, model_b.federation.config
    pairs = {"tuner": (config_a.tuner.model_dump(), config_b.tuner.model_dump())}
    if head == "source":
        pairs["head"] = (config_a.head.model_dump(), config_b.head.model_dump())
    for section, (options_a, options_b) in pairs.items():
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
