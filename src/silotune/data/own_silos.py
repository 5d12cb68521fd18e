"""Read the rows of the configuration's section `silos`: a user's own files, folders, tables and hub data sets."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from silotune.config import SiloConfig
from silotune.config.paths import HUB_PREFIX
from silotune.config.tables import MEMORY_PREFIX, kept_rows
from silotune.data.generation_rows import Format, find_format, generation_rows, instruction_rows
from silotune.data.hub import read_hub_records
from silotune.data.readers import (
    FORMATS,
    Record,
    file_format,
    label_names,
    read_labels,
    read_records,
    require_columns,
    with_groups,
    with_units,
)
from silotune.data.row_checks import alike_labels
from silotune.data.rows import LabeledSet, Row, Splits
from silotune.data.targets import label_set_names, target_rows
from silotune.data.tasks import Task, are_truth_values, label_form, make_task
from silotune.errors import InputError


def own_sets(
    silos: list[SiloConfig], column: str | None, unit: str | None = None, declared: bool = False
) -> dict[str, LabeledSet]:
    """Read the rows of `silos`: labeled texts, or generation data in the format that the columns show.

    Args:
        silos: the entries of the configuration.
        column: column whose values define natural silos; stored as `Row.group`.
        unit: column that says whose a row is; stored as `Row.unit`.
        declared: whether label names must be declared, because names read from rows would tell of them.
    """
    records: dict[str, dict[str, list[Record]]] = {}
    paths: dict[str, dict[str, Path]] = {}
    for silo in silos:
        with _naming(silo):
            parts = _silo_files(silo.path, silo.encoding)
            records[silo.name] = {part: read() for part, (_, read) in parts.items()}
            paths[silo.name] = {part: path for part, (path, _) in parts.items()}
    formats = {silo.name: _format(silo, records[silo.name]["train"][0]) for silo in silos}
    tasks: dict[str, Task] = {}
    for silo in silos:
        name = silo.task or silo.name
        has_labels = silo.kind in ("classification", "multilabel") and formats[silo.name] is None
        if declared and has_labels and not _declared(silos, name):
            raise InputError(
                f"silo {silo.name!r}: labels: are to be declared beside privacy.unit, as names read from rows tell "
                "which ones they have; allowed: a list such as [negative, positive]"
            )
        task = _task(silo, name, formats[silo.name], partial(_labels, silos, name, paths, records))
        if tasks.setdefault(name, task) != task:
            raise InputError(
                f"silo {silo.name!r}: metric, positive or kind differs from the other silos of task {name!r}"
            )
    sets: dict[str, LabeledSet] = {}
    for silo in silos:
        task = tasks[silo.task or silo.name]
        own_paths, own_records = paths[silo.name], records[silo.name]
        with _naming(silo):
            named = _declared(silos, task.name)
            rows = {
                part: _rows(silo, task, formats[silo.name], own_paths[part], of_part, named)
                for part, of_part in own_records.items()
            }
            rows["train"] = with_groups(own_paths["train"], own_records["train"], rows["train"], column)
            rows["train"] = with_units(own_paths["train"], own_records["train"], rows["train"], unit)
        sets[silo.name] = LabeledSet(task, Splits(**rows), unsplit=len(rows) == 1)
    return sets


def _declared(silos: list[SiloConfig], task: str) -> bool:
    """Return whether one of a task's silos declares its label names."""
    return any(silo.labels for silo in silos if (silo.task or silo.name) == task)


@contextmanager
def _naming(silo: SiloConfig) -> Iterator[None]:
    """Begin the message of an error about a silo's file or table with the silo's name."""
    try:
        yield
    except InputError as error:
        raise InputError(f"silo {silo.name!r}: {error}") from error


def _rows(
    silo: SiloConfig, task: Task, format: Format | None, path: Path, records: list[Record], declared: bool
) -> list[Row]:
    if format is not None:
        return generation_rows(path, records, format)
    if task.kind == "generation":
        return instruction_rows(path, records, silo.columns, silo.label)
    separator = silo.label_separator
    return target_rows(
        path, records, silo.columns, silo.label, task, by_index=False, separator=separator, declared=declared
    )


def _task(silo: SiloConfig, name: str, format: Format | None, labels: Callable[[], tuple[str, ...]]) -> Task:
    culprit = f"silo {silo.name!r}"
    if silo.kind == "generation" or format is not None:
        if silo.positive is not None:
            raise InputError(f"{culprit}: positive is a label, and this silo's rows have answers")
        usual = "loss" if format == "preferences" else None
        return make_task(name, culprit, "generation", metric=silo.metric or usual)
    if silo.kind == "regression":
        return make_task(name, culprit, "regression", metric=silo.metric)
    if silo.kind == "multilabel":
        return make_task(name, culprit, "multilabel", labels(), silo.metric)
    return make_task(name, culprit, "classification", labels(), silo.metric, silo.positive)


def _format(silo: SiloConfig, record: Record) -> Format | None:
    """Return the format of generation data that the columns show; None if they are the configured ones."""
    given = silo.kind in ("regression", "multilabel") or {*silo.columns, silo.label} & record.keys()
    return None if given else find_format(record)


Part = tuple[Path, Callable[[], list[Record]]]
"""A split's file or data set, for messages, and the function that reads its records."""


def _silo_files(source: str, encoding: str) -> dict[str, Part]:
    """Find a silo's records by split: a file, a folder of files, a data set of the hub, or a table in memory."""
    if source.startswith(MEMORY_PREFIX):
        return {part: (Path(source), partial(list, rows)) for part, rows in kept_rows(source).items()}
    if source.startswith(HUB_PREFIX):
        return {part: (Path(source), partial(list, records)) for part, records in read_hub_records(source).items()}
    return {part: (path, partial(read_records, path, encoding)) for part, path in _split_files(Path(source)).items()}


def _split_files(path: Path) -> dict[str, Path]:
    """Find a silo's files by split: a single file is the training split; a folder has one file per split."""
    if not path.is_dir():
        return {"train": path}
    files_by_split: dict[str, Path] = {}
    for split_name in ("train", "validation", "test"):
        files = sorted(file for file in path.glob(f"{split_name}.*") if file_format(file)[0])
        if len(files) > 1:
            raise InputError(f"silo folder {path}: {' and '.join(file.name for file in files)}; only one may be there")
        if files:
            files_by_split[split_name] = files[0]
    if "train" not in files_by_split:
        raise InputError(
            f"silo folder {path}: no train file; allowed: {', '.join(f'train{suffix}' for suffix in FORMATS)}"
        )
    return files_by_split


def _labels(
    silos: list[SiloConfig],
    task: str,
    files: dict[str, dict[str, Path]],
    records: dict[str, dict[str, list[Record]]],
) -> tuple[str, ...]:
    """Return a task's label names: declared ones, else those in its silos' training rows, forms of one label as one."""
    members = [silo for silo in silos if (silo.task or silo.name) == task]
    declared = {tuple(silo.labels) for silo in members if silo.labels}
    if len(declared) > 1:
        raise InputError(f"silos: task {task!r} is declared with different labels: {sorted(declared)}")
    if declared:
        return declared.pop()
    found: set[str] = set()
    for silo in members:
        path, rows = files[silo.name]["train"], records[silo.name]["train"]
        with _naming(silo):
            require_columns(path, rows[0], [*silo.columns, silo.label])
            if silo.kind == "multilabel":
                found |= {*label_set_names(path, rows, silo.label, silo.label_separator)}
            else:
                found |= {*map(str, read_labels(path, rows, silo.label))}
    composed = {unicodedata.normalize("NFC", label) for label in found}
    forms = {label_form(label, are_truth_values(composed)) for label in composed}
    names = label_names(forms if len(forms) < len(composed) else composed)
    if len(members) > 1 and (alike := alike_labels(names)):
        raise InputError(
            f"task {task!r}: labels of its silos differ in spelling only: {', '.join(map(repr, alike[0]))}; name the "
            "labels that are meant in `labels` of one of these silos"
        )
    return names
