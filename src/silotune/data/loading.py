"""From the configuration's data keys to every silo's rows."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

from silotune.config import Config, DataConfig, SiloConfig
from silotune.data.files import FORMATS, Record, label_names, labels_of, read_records, require_columns, rows_of
from silotune.data.folders import GLUE_TEXT, LabelledSet, check_glue, read_folder, read_glue_hub, task_folders
from silotune.data.instructions import instruction_rows
from silotune.data.splits import SplitRule, split
from silotune.data.tasks import SiloData, Splits, Task, check_silo, generation_task, make_task
from silotune.errors import InputError


def load_silos(config: Config) -> list[SiloData]:
    """All silos of a run, checked.

    Raises:
        InputError: for anything missing or malformed in the data.
    """
    seed = config.seed if config.data.seed is None else config.data.seed
    rule = _rule(config.data)
    silos = _own_silos(config.silos, rule, seed) if config.silos else _set_silos(config.data, rule, seed)
    return [check_silo(silo) for silo in silos]


def _rule(data: DataConfig) -> SplitRule:
    return SplitRule(
        merge=data.merge,
        ratio=data.ratio,
        rows_per_silo=data.rows_per_silo,
        train_rows=data.train_rows,
        validation_rows=data.validation_rows,
        test_rows=data.test_rows,
    )


def demo_folder() -> Path:
    """The demo's data, inside the package."""
    return Path(str(resources.files("silotune") / "data" / "demo"))


def _set_silos(data: DataConfig, rule: SplitRule, seed: int) -> list[SiloData]:
    path = demo_folder() if data.set == "demo" and data.path is None else None if data.path is None else Path(data.path)
    if path is None and data.set != "glue":
        raise InputError(f"data.path: data set {data.set!r} needs a folder (data.path=FOLDER)")
    names = data.tasks or (task_folders(path) if path else [])
    if not names:
        raise InputError(f"data.tasks: name the tasks to load; allowed: {', '.join(GLUE_TEXT)}")
    if path is None:
        check_glue(names)
    silos: list[SiloData] = []
    for name in names:
        found: LabelledSet = read_folder(path, name) if path else read_glue_hub(name)
        task = found.task
        if data.task is not None:  # all silos hold one task, so that they may share a head
            task = replace(task, name=data.task, labels=_renamed(name, task.labels, data.labels))
        if silos and data.task is not None and task != silos[0].task:
            raise InputError(
                f"data.task: {name!r} has other labels ({', '.join(task.labels)}) or another metric than "
                f"{silos[0].name!r} ({', '.join(silos[0].task.labels)}); data.labels can give them the same names"
            )
        silos.append(SiloData(name, task, split(found.splits, rule, seed, name)))
    return silos


def _renamed(name: str, labels: tuple[str, ...], wanted: list[str] | None) -> tuple[str, ...]:
    """A set's label names, or the wanted ones in their place."""
    if wanted is not None and len(wanted) != len(labels):
        raise InputError(f"data.labels: {len(wanted)} names, but {name!r} has {len(labels)}: {', '.join(labels)}")
    return labels if wanted is None else tuple(wanted)


def _own_silos(silos: list[SiloConfig], rule: SplitRule, seed: int) -> list[SiloData]:
    files = {silo.name: _silo_files(Path(silo.path)) for silo in silos}
    records = {name: {part: read_records(path) for part, path in found.items()} for name, found in files.items()}
    tasks: dict[str, Task] = {}
    for silo in silos:
        name = silo.task or silo.name
        if silo.kind == "generation":
            task = generation_task(name, silo.metric or "rouge1", f"silo {silo.name!r}")
        else:
            labels = _labels(silos, name, files, records)
            task = make_task(name, labels, silo.metric or "accuracy", f"silo {silo.name!r}")
        if tasks.setdefault(name, task) != task:
            raise InputError(f"silo {silo.name!r}: metric or kind differs from the other silos of task {name!r}")
    result = []
    for silo in silos:
        task = tasks[silo.task or silo.name]
        rows = {
            part: instruction_rows(files[silo.name][part], found, silo.columns, silo.label)
            if silo.kind == "generation"
            else rows_of(files[silo.name][part], found, silo.columns, silo.label, task.labels, by_index=False)
            for part, found in records[silo.name].items()
        }
        whole = len(rows) == 1
        own_rule = SplitRule(**{**rule.__dict__, "merge": whole or rule.merge})
        result.append(SiloData(silo.name, task, split(Splits(**rows), own_rule, seed, silo.name)))
    return result


def _silo_files(path: Path) -> dict[str, Path]:
    """A single file is the whole; a folder holds train, validation and test files."""
    if not path.is_dir():
        return {"train": path}
    found: dict[str, Path] = {}
    for part in ("train", "validation", "test"):
        files = sorted(file for file in path.glob(f"{part}.*") if file.suffix.lower() in FORMATS)
        if len(files) > 1:
            raise InputError(f"silo folder {path}: {' and '.join(file.name for file in files)}; only one may be there")
        if files:
            found[part] = files[0]
    if "train" not in found:
        raise InputError(f"silo folder {path}: no train file; allowed: {', '.join(f'train{kind}' for kind in FORMATS)}")
    return found


def _labels(
    silos: list[SiloConfig],
    task: str,
    files: dict[str, dict[str, Path]],
    records: dict[str, dict[str, list[Record]]],
) -> tuple[str, ...]:
    """A task's label names: as declared, else those found in its silos' training rows."""
    members = [silo for silo in silos if (silo.task or silo.name) == task]
    declared = {tuple(silo.labels) for silo in members if silo.labels}
    if len(declared) > 1:
        raise InputError(f"silos: task {task!r} is declared with different labels: {sorted(declared)}")
    if declared:
        return declared.pop()
    found: list[str | int] = []
    for silo in members:
        path, rows = files[silo.name]["train"], records[silo.name]["train"]
        require_columns(path, rows[0], [silo.label])
        found += labels_of(path, rows, silo.label)
    return label_names(found)
