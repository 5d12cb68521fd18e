"""Load the rows of all silos of a run: own files, data folders, the hub, or one data set that is partitioned."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

from silotune.config import Config, DataConfig
from silotune.data.folders import read_folder, task_folders
from silotune.data.hub import HUB, HubSet, read_hub_set
from silotune.data.own_silos import own_sets
from silotune.data.partition import partition_by_value, partition_rows, silo_names
from silotune.data.rows import LabeledSet, SiloData, Splits, check_silo
from silotune.data.splits import SplitRule, split
from silotune.data.tasks import KINDS, Task, make_task, numbered_positive
from silotune.errors import InputError, unknown_name_error


def load_silos(config: Config) -> list[SiloData]:
    """Load and check all silos of a run. Silos of one partitioned data set share its validation and test rows."""
    return _load(config)[0]


def load_absent(config: Config) -> list[SiloData]:
    """Load the silos that `evaluation` excludes from training (`unseen`, `new_silos`)."""
    return _load(config)[1] if config.evaluation.absent else []


def _load(config: Config) -> tuple[list[SiloData], list[SiloData]]:
    partition, absent = config.partition, config.evaluation.absent
    if partition.name != "none" and (absent or config.data.parts > 1):
        key = "data.parts" if config.data.parts > 1 else "evaluation.unseen, evaluation.new_silos"
        raise InputError(f"{key}: not of a data set that is partitioned (partition={partition.name})")
    data = config.data
    if absent and data.tasks:
        data = data.model_copy(update={"tasks": list(dict.fromkeys([*data.tasks, *absent]))})
    unit, noised = config.privacy.unit_column, config.privacy.unit is not None
    if config.silos:
        sets = own_sets(config.silos, partition.column, unit, declared=noised)
    else:
        sets = _named_sets(data, partition.column, unit)
    for name in absent:
        if name not in sets:
            raise unknown_name_error("name in evaluation.unseen or evaluation.new_silos", name, sets)
    if len(absent) == len(sets):
        raise InputError("evaluation.unseen, evaluation.new_silos: no silo is left to train")
    seed = config.data_seed
    if partition.name != "none":
        return _partition(sets, config, seed), []
    rule = _split_rule(config)
    silos = [_split_silo(name, labeled_set, rule, seed, noised) for name, labeled_set in sets.items()]
    excluded = {silo.name: silo for silo in silos if silo.name in absent}
    present = [part for silo in silos if silo.name not in absent for part in _divide_train(silo, data.parts)]
    return present, [excluded[name] for name in absent]


def _divide_train(silo: SiloData, number: int) -> list[SiloData]:
    """Divide a silo's training rows among several silos, which share its validation and test rows."""
    if number == 1:
        return [silo]
    train, validation, test = silo.splits.train, silo.splits.validation, silo.splits.test
    return [
        check_silo(SiloData(f"{silo.name}-{part + 1}", silo.task, Splits(train[part::number], validation, test)))
        for part in range(number)
    ]


def _partition(sets: dict[str, LabeledSet], config: Config, seed: int) -> list[SiloData]:
    """Divide one data set's training rows among silos; its other rows stay together for central evaluation."""
    partition = config.partition
    if len(sets) != 1:
        only = "data.tasks=NAME" if not config.silos else "one entry of silos"
        raise InputError(
            f"partition: divides one labeled data set, found {len(sets)} ({', '.join(sets)}); give {only}, or "
            "partition=none"
        )
    ((name, labeled_set),) = sets.items()
    if labeled_set.task.kind != "classification" and partition.name in ("dirichlet", "shards"):
        rows = KINDS[labeled_set.task.kind]
        raise InputError(
            f"partition={partition.name}: needs rows of one label each, and {name!r} holds {rows}; allowed: "
            "iid, quantity, column"
        )
    rule = replace(_split_rule(config), halve=True, rows_per_silo=config.data.rows)
    all_rows = _split_silo(name, labeled_set, rule, seed).splits
    if partition.name == "column":
        groups = partition_by_value([row.group for row in all_rows.train], partition.min_rows)
    else:
        divided = partition_rows(
            [row.label for row in all_rows.train], partition, seed if partition.seed is None else partition.seed
        )
        groups = dict(zip(silo_names(partition.silos), divided, strict=True))
    return [
        SiloData(
            silo, labeled_set.task, Splits([all_rows.train[row] for row in rows], all_rows.validation, all_rows.test)
        )
        for silo, rows in groups.items()
    ]


def _split_silo(name: str, labeled_set: LabeledSet, rule: SplitRule, seed: int, noised: bool = False) -> SiloData:
    rule = replace(rule, merge=rule.merge or labeled_set.unsplit)
    return check_silo(SiloData(name, labeled_set.task, split(labeled_set.splits, rule, seed, name)), noised)


def _split_rule(config: Config) -> SplitRule:
    data = config.data
    return SplitRule(
        merge=data.merge and not config.silos,  # entries of `silos`: only single files are split, see `_make_splits`
        ratio=data.ratio,
        rows_per_silo=data.rows_per_silo,
        train_rows=data.train_rows,
        validation_rows=data.validation_rows,
        test_rows=data.test_rows,
    )


def demo_folder() -> Path:
    """Return the folder of the demo's data, inside the package."""
    return Path(str(resources.files("silotune") / "data" / "demo"))


def _named_sets(data: DataConfig, column: str | None, unit: str | None) -> dict[str, LabeledSet]:
    path = demo_folder() if data.set == "demo" and data.path is None else None if data.path is None else Path(data.path)
    published = {} if path else _published(data, column or unit)
    names = data.tasks or (task_folders(path) if path else [])
    sets: dict[str, LabeledSet] = {}
    for name in names:
        labeled_set = read_folder(path, name, column, unit) if path else read_hub_set(name, published[name])
        task = labeled_set.task
        if data.task is not None:  # one task name for all silos, so that they may share a head
            task = _renamed(task, data.task, data.labels)
        if data.metric is not None or data.positive is not None:
            task = _judged_by(task, data.metric or task.metric, data.positive, name)
        first_set = next(iter(sets.items()), None)
        if first_set is not None and data.task is not None and task != first_set[1].task:
            raise InputError(
                f"data.task: {name!r} has other labels ({', '.join(task.labels)}) or another metric than "
                f"{first_set[0]!r} ({', '.join(first_set[1].task.labels)}); data.labels can give them the same names"
            )
        sets[name] = replace(labeled_set, task=task)
    return sets


def _published(data: DataConfig, column: str | None) -> dict[str, HubSet]:
    """Return the data set's tasks on the hub; errors are raised before any download."""
    if data.set is None:  # only with `federation.silos`: other configurations without data are refused earlier
        raise InputError(
            "federation.silos: these silos' rows are on their own machines, not here; use `silotune federation start`, "
            "or give silos, data.path or a preset"
        )
    published = HUB.get(data.set, {})
    if data.set == "glue":
        if not data.tasks:
            raise InputError(f"data.tasks: name the tasks to load; allowed: {', '.join(published)}")
        for name in data.tasks:
            if name not in published:
                raise unknown_name_error("GLUE task in data.tasks", name, published)
    elif not data.tasks or not {*data.tasks} <= {*published}:
        what = f"data set {data.set!r}" if not data.tasks else f"{', '.join(data.tasks)} of data set {data.set!r}"
        raise InputError(f"data.path: {what} needs a folder (data.path=FOLDER)")
    if column is not None:
        raise InputError("partition.column, privacy.unit: data from the hub has no such column; give data.path=FOLDER")
    return published


def _judged_by(task: Task, metric: str, positive: str | None, name: str) -> Task:
    """Return the task with another metric or positive label; `name` is the data set's."""
    culprit = f"data.metric ({name!r})"
    if task.kind != "classification":
        if positive is not None:
            what = {"generation": "answers", "regression": "numbers"}.get(task.kind, "several labels a row")
            raise InputError(f"data.positive: is a label, and {name!r} has {what}")
        return make_task(task.name, culprit, task.kind, task.labels, metric)
    if metric == "f1":  # the data set numbers its labels
        positive = positive or task.positive or numbered_positive(task.labels)
    return make_task(task.name, culprit, task.kind, task.labels, metric, positive or task.positive or None)


def _renamed(task: Task, name: str, wanted: list[str] | None) -> Task:
    """Return the task under another name, and with the wanted label names if there are any."""
    if wanted is None:
        return replace(task, name=name)
    if not task.labels:
        raise InputError(f"data.labels: {task.name!r} has none, but {KINDS[task.kind]}; leave it out")
    if len(wanted) != len(task.labels):
        labels = ", ".join(task.labels)
        raise InputError(f"data.labels: {len(wanted)} names, but {task.name!r} has {len(task.labels)}: {labels}")
    positive = wanted[task.positive_index] if task.positive else ""
    return replace(task, name=name, labels=tuple(wanted), positive=positive)
