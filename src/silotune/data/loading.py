"""Load and split the rows of a run's silos: own files, data folders, the hub, or one data set that is partitioned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from silotune.config import Config, DataConfig
from silotune.core.randomness import sampler
from silotune.data.hub import HUB, HubSet, read_hub_set
from silotune.data.kinds.retrieval import ranked_among
from silotune.data.own_rows import with_own_rows
from silotune.data.own_silos import own_sets, read_folder, task_folders
from silotune.data.partition import partition_by_value, partition_rows, silo_names
from silotune.data.row_folder import read_rows
from silotune.data.rows import LabeledSet, Row, SiloData, Splits, check_silo
from silotune.data.tasks import Task, make_task, numbered_positive
from silotune.errors import InputError, require_known

if TYPE_CHECKING:
    from silotune.config.coordinator import ServerConfig


Units = list[list[Row]]
"""The rows of each unit."""


@dataclass(frozen=True)
class SplitRule:
    """How rows become splits.

    Args:
        merge: join train and validation, cap them at `rows_per_silo` and split by `ratio` (FedMCP, section V-A).
            Otherwise the published splits are kept. A missing validation split is then cut from the training rows
            beyond `train_rows` (a tenth of all if there are none; nothing if `validation_rows` is 0), and without a
            test split the validation split serves as test split.
        halve: if only one of validation and test exists, halve it into both instead.
        ratio: shares of train, validation and test for `merge`.
        rows_per_silo: cap before the split with `merge`, else a cap of train alone.
        train_rows: cap of the training split.
        validation_rows: cap of the validation split.
        test_rows: cap of the test split.
    """

    merge: bool = False
    halve: bool = False
    ratio: tuple[float, float, float] = (0.6, 0.2, 0.2)
    rows_per_silo: int | None = None
    train_rows: int | None = None
    validation_rows: int | None = None
    test_rows: int | None = None


def split(published: Splits, rule: SplitRule, seed: int, silo: str) -> Splits:
    """Make a silo's splits; its name and the seed are part of the purpose of the shuffles."""
    if rule.merge and published.test:
        raise InputError(f"silo {silo!r}: data.merge=true would throw its test split away; set data.merge=false")
    make = _split_merged if rule.merge else _complete
    train, validation, test = make(published, rule, seed, silo)
    return Splits(
        _rows(train[: rule.train_rows]), _rows(validation[: rule.validation_rows]), _rows(test[: rule.test_rows])
    )


def _split_merged(published: Splits, rule: SplitRule, seed: int, silo: str) -> tuple[Units, Units, Units]:
    units = _shuffled(published.train + published.validation, seed, silo, "merged")[: rule.rows_per_silo]
    train, validation = (round(share * len(units)) for share in rule.ratio[:2])
    end = train + validation
    if not 0 < train < end < len(units):
        shares = ":".join(f"{share:g}" for share in rule.ratio)
        raise InputError(
            f"silo {silo!r}: {len(units)} rows are too few to split {shares} into train, validation and test"
        )
    return units[:train], units[train:end], units[end:]


def _complete(published: Splits, rule: SplitRule, seed: int, silo: str) -> tuple[Units, Units, Units]:
    train, validation, test = (
        _shuffled(getattr(published, name), seed, silo, name) for name in ("train", "validation", "test")
    )
    if rule.halve and bool(validation) != bool(test):
        held_out = validation or test
        validation, test = held_out[: len(held_out) // 2], held_out[len(held_out) // 2 :]
    if not test:
        validation, test = [], validation
    if not test:
        raise InputError(f"silo {silo!r}: the data set has neither a test nor a validation split")
    if not validation and rule.validation_rows != 0:
        most = len(train) - max(1, round(0.1 * len(train)))
        size = most if rule.train_rows is None else min(rule.train_rows, most)
        train, validation = train[:size], train[size:]
    return train[: rule.rows_per_silo], validation, test


def _shuffled(rows: Sequence[Row], seed: int, silo: str, purpose: str) -> Units:
    """Return the rows of each unit, the units in an order that is drawn."""
    units: dict[object, list[Row]] = {}
    for index, row in enumerate(rows):
        units.setdefault(row.unit or index, []).append(row)
    shuffled = list(units.values())
    sampler(seed, "rows", purpose, silo).shuffle(shuffled)
    return shuffled


def _rows(units: Units) -> list[Row]:
    return [row for unit in units for row in unit]


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
        data = data.replace(tasks=list(dict.fromkeys([*data.tasks, *absent])))
    noised, column = config.privacy.unit is not None, config.survey.column or partition.column
    unit = config.privacy.unit_column if noised else config.evaluation.unit
    if config.silos:
        sets = own_sets(config.silos, column, unit, declared=noised)
    else:
        sets = _named_sets(data, column, unit, noised)
    for name in absent:
        require_known("name in evaluation.unseen or evaluation.new_silos", name, sets)
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
    """Divide one data set's training rows among silos; its other rows stay together, and are weighted for each silo.

    Where `partition.evaluation` is `own`, they may be dealt to the silos, too (`data/own_rows.py`).
    """
    partition = config.partition
    if len(sets) != 1:
        only = "data.tasks=NAME" if not config.silos else "one entry of silos"
        raise InputError(
            f"partition: divides one labeled data set, found {len(sets)} ({', '.join(sets)}); give {only}, or "
            "partition=none"
        )
    ((name, labeled_set),) = sets.items()
    if not labeled_set.task.rules.one_label and partition.name in ("dirichlet", "shards"):
        rows = labeled_set.task.rules.rows
        raise InputError(
            f"partition={partition.name}: needs rows of one label each, and {name!r} holds {rows}; allowed: "
            "iid, quantity, column"
        )
    rule = replace(_split_rule(config), halve=True, rows_per_silo=config.data.rows)
    all_rows = _split_silo(name, labeled_set, rule, seed).splits
    draw_seed = seed if partition.seed is None else partition.seed
    if partition.name == "column":
        groups = partition_by_value([row.group for row in all_rows.train], partition.min_rows)
    else:
        divided = partition_rows([row.label for row in all_rows.train], partition, draw_seed)
        groups = dict(zip(silo_names(partition.silos), divided, strict=True))
    silos = [
        SiloData(silo, labeled_set.task, replace(all_rows, train=[all_rows.train[row] for row in rows]))
        for silo, rows in groups.items()
    ]
    return with_own_rows(silos, list(groups.values()), all_rows, partition, draw_seed)


def _split_silo(name: str, labeled_set: LabeledSet, rule: SplitRule, seed: int, noised: bool = False) -> SiloData:
    rule = replace(rule, merge=rule.merge or labeled_set.unsplit)
    splits = split(labeled_set.splits, rule, seed, name)
    if labeled_set.passages:
        splits.test = ranked_among(splits.test, labeled_set.passages)
    return check_silo(SiloData(name, labeled_set.task, splits), noised)


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


def _named_sets(data: DataConfig, column: str | None, unit: str | None, noised: bool) -> dict[str, LabeledSet]:
    path = demo_folder() if data.set == "demo" and data.path is None else None if data.path is None else Path(data.path)
    published = {} if path else _published(data, column or unit)
    names = data.tasks or (task_folders(path) if path else [])
    sets: dict[str, LabeledSet] = {}
    for name in names:
        if path:
            labeled_set = read_folder(path, name, column, unit, noised, data.labels)
        else:
            labeled_set = read_hub_set(name, published[name])
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
            require_known("GLUE task in data.tasks", name, published)
    elif not data.tasks or not {*data.tasks} <= {*published}:
        what = f"data set {data.set!r}" if not data.tasks else f"{', '.join(data.tasks)} of data set {data.set!r}"
        raise InputError(f"data.path: {what} needs a folder (data.path=FOLDER)")
    if column is not None:
        raise InputError(
            "partition.column, privacy.unit, evaluation.unit: hub data have no such column; give data.path=FOLDER"
        )
    return published


def _judged_by(task: Task, metric: str, positive: str | None, name: str) -> Task:
    """Return the task with another metric or positive label; `name` is the data set's."""
    culprit = f"data.metric ({name!r})"
    if not task.rules.one_label:
        if positive is not None:
            what = task.rules.rows.removeprefix("texts with ")
            raise InputError(f"data.positive: is a label, and {name!r} has {what}")
        return make_task(task.name, culprit, task.kind, task.labels, metric)
    if metric == "f1":  # the data set numbers its labels
        positive = positive or task.positive or numbered_positive(task.labels)
    return make_task(task.name, culprit, task.kind, task.labels, metric, positive or task.positive or None)


def _renamed(task: Task, name: str, names: list[str] | None) -> Task:
    """Return the task under another name, and with the wanted label names if there are any."""
    if names is None:
        return replace(task, name=name)
    if not task.labels:
        raise InputError(f"data.labels: {task.name!r} has none, but {task.rules.rows}; leave it out")
    if len(names) != len(task.labels):
        labels = ", ".join(task.labels)
        raise InputError(f"data.labels: {len(names)} names, but {task.name!r} has {len(task.labels)}: {labels}")
    positive = names[task.positive_index] if task.positive else ""
    return replace(task, name=name, labels=tuple(names), positive=positive)


NO_LABEL = -1
"""Label of rows without one; it is no class index, so a loss that uses it fails."""


def without_labels(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without label and answer."""
    return [replace(row, label=min(row.label, NO_LABEL), answer="") for row in rows]


def own_labeled_rows(config: Config) -> SiloData | None:
    """Read the coordinator's own labeled rows (`federation.labelled`); None if they are to be drawn from the silos'."""
    if config.federation.labelled is not None:
        return read_rows(Path(config.federation.labelled), "coordinator")
    if config.privacy.unit is not None:
        raise InputError(
            f"privacy.unit: method={config.method.name} would draw the coordinator's labeled rows from the silos, "
            "without noise; allowed: federation.labelled=FOLDER, rows of its own"
        )
    return None


def draw_labeled_rows(data: Sequence[SiloData], server: ServerConfig, seed: int) -> SiloData:
    """Draw the coordinator's labeled rows from all silos' training rows, balanced by label.

    The silos keep the drawn rows. The draw depends on the rows and the seed, but not on their division among silos.
    """
    task = data[0].task
    task_names = sorted({silo.task.name for silo in data})
    if len(task_names) > 1 or not task.rules.one_label:
        raise InputError(f"server: labeled rows are of one classification task, found {', '.join(task_names)}")
    if server.labels_per_class is None and server.labelled_rows is None:
        raise InputError("server.labels_per_class: say how many labeled rows of each label the coordinator has")
    sample: list[Row] = []
    rows = sorted((row for silo in data for row in silo.splits.train), key=lambda row: (row.label, row.texts))
    for label, name in enumerate(task.labels):
        of_label = [row for row in rows if row.label == label]
        each, more = divmod(server.labelled_rows or 0, len(task.labels))
        count = server.labels_per_class or each + (label < more)
        if count > len(of_label):
            key = "labels_per_class" if server.labels_per_class else "labelled_rows"
            raise InputError(
                f"server.{key}: {count} rows of label {name!r} are asked for, but there are only {len(of_label)}"
            )
        sample += sampler(seed, "labelled", name).sample(of_label, count)
    return SiloData("coordinator", task, Splits(train=sample))
