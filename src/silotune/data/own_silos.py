"""Read the rows of the configuration's section `silos` (own files, tables, hub data sets), or of a data folder."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from silotune.config import SiloConfig
from silotune.config.paths import HUB_PREFIX
from silotune.config.tables import MEMORY_PREFIX, kept_rows
from silotune.config.validators import NAME_RULE, is_name
from silotune.core.files import decode_text
from silotune.data.generation_rows import Format, find_format, generation_rows, instruction_rows
from silotune.data.hub import read_hub_records
from silotune.data.kinds import KINDS, Reading
from silotune.data.kinds.entities import Entities
from silotune.data.kinds.retrieval import read_passages
from silotune.data.readers import (
    FORMATS,
    Record,
    file_format,
    label_names,
    read_records,
    require_columns,
    with_groups,
    with_units,
)
from silotune.data.row_checks import alike_labels
from silotune.data.rows import LabeledSet, Row, Splits
from silotune.data.targets import target_rows
from silotune.data.tasks import Task, UndeclaredLabels, are_truth_values, label_form, make_task, numbered_positive
from silotune.errors import InputError, unknown_name_error


def own_sets(
    silos: list[SiloConfig], column: str | None, unit: str | None = None, declared: bool = False
) -> dict[str, LabeledSet]:
    """Read the rows of `silos`: labeled texts, or generation data in the format that the columns show.

    Values of `column` define natural silos (`Row.group`), those of `unit` say whose a row is (`Row.unit`). With
    `declared`, label names must be declared, because names read from rows would tell of them.
    """
    records: dict[str, dict[str, list[Record]]] = {}
    paths: dict[str, dict[str, Path]] = {}
    for silo in silos:
        with _naming(silo):
            parts = _silo_files(silo)
            records[silo.name] = {part: reader() for part, (_, reader) in parts.items()}
            paths[silo.name] = {part: path for part, (path, _) in parts.items()}
    formats = {silo.name: _format(silo, records[silo.name]["train"][0]) for silo in silos}
    tasks: dict[str, Task] = {}
    for silo in silos:
        name = silo.task or silo.name
        has_labels = KINDS[silo.kind].least_labels and formats[silo.name] is None
        if declared and has_labels and not _declared(silos, name):
            raise UndeclaredLabels(
                f"silo {silo.name!r}: labels: are to be declared beside privacy.unit, as names read from rows tell "
                "which ones they have; allowed: a list such as [negative, positive] (`silo join --labels`)"
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
                part: _rows(silo, task, formats[silo.name], own_paths[part], of_part, named, declared)
                for part, of_part in own_records.items()
            }
            splits = _splits(own_paths, own_records, rows, column, unit, declared)
            passages = () if silo.passages is None else read_passages(Path(silo.passages), silo.encoding)
        sets[silo.name] = LabeledSet(task, splits, len(rows) == 1, passages)
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
    silo: SiloConfig,
    task: Task,
    format: Format | None,
    path: Path,
    records: list[Record],
    declared: bool,
    noised: bool,
) -> list[Row]:
    if format is not None:
        return generation_rows(path, records, format)
    if not task.labeled:
        return instruction_rows(path, records, silo.columns, silo.label)
    separator = silo.label_separator
    return target_rows(
        path,
        records,
        silo.columns,
        silo.label,
        task,
        by_index=False,
        separator=separator,
        declared=declared,
        noised=noised,
    )


def _task(silo: SiloConfig, name: str, format: Format | None, labels: Callable[[], tuple[str, ...]]) -> Task:
    culprit = f"silo {silo.name!r}"
    if format is not None or not KINDS[silo.kind].labeled:
        if silo.positive is not None:
            raise InputError(f"{culprit}: positive is a label, and this silo's rows have answers")
        usual = "loss" if format == "preferences" else None
        return make_task(name, culprit, "generation", metric=silo.metric or usual)
    names = labels() if KINDS[silo.kind].least_labels else ()
    return make_task(name, culprit, silo.kind, names, silo.metric, silo.positive)


def _format(silo: SiloConfig, record: Record) -> Format | None:
    """Return the format of generation data that the columns show; None if they are the configured ones."""
    given = silo.kind not in ("classification", "generation") or {*silo.columns, silo.label} & record.keys()
    return None if given else find_format(record)


Part = tuple[Path, Callable[[], list[Record]]]
"""A split's file or data set, for messages, and the function that reads its records."""


def _silo_files(silo: SiloConfig) -> dict[str, Part]:
    """Find a silo's records by split: a file, a folder of files, a data set of the hub, or a table in memory."""
    source = silo.path
    if source.startswith(MEMORY_PREFIX):
        return {part: (Path(source), partial(list, rows)) for part, rows in kept_rows(source).items()}
    if source.startswith(HUB_PREFIX):
        return {part: (Path(source), partial(list, records)) for part, records in read_hub_records(source).items()}
    how = silo.encoding, silo.column_separator
    return {part: (path, partial(read_records, path, *how)) for part, path in _split_files(Path(source)).items()}


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
    spellings: set[str] = set()
    for silo in members:
        path, rows = files[silo.name]["train"], records[silo.name]["train"]
        with _naming(silo):
            reading = Reading(path, silo.columns, silo.label, separator=silo.label_separator)
            require_columns(path, rows[0], KINDS[silo.kind]().columns(reading, rows[0]))
            spellings |= {*KINDS[silo.kind]().label_names(reading, rows)}
    composed = {unicodedata.normalize("NFC", label) for label in spellings}
    forms = {label_form(label, are_truth_values(composed)) for label in composed}
    names = label_names(forms if len(forms) < len(composed) else composed)
    if len(members) > 1 and (alike := alike_labels(names)):
        raise InputError(
            f"task {task!r}: labels of its silos differ in spelling only: {', '.join(map(repr, alike[0]))}; name the "
            "labels that are meant in `labels` of one of these silos"
        )
    return names


def task_folders(path: Path) -> list[str]:
    """List the tasks of a data folder: its subfolders with a `train.jsonl`."""
    if not path.is_dir():
        raise InputError(f"data.path: {path} is not a folder")
    names = sorted(entry.name for entry in path.iterdir() if (entry / "train.jsonl").is_file())
    if not names:
        raise InputError(f"data.path: no task folder with a train.jsonl in {path}")
    for name in names:
        if not is_name(name):
            raise InputError(f"data.path: the task folder {path / name} has no usable name; allowed: {NAME_RULE}")
    return names


def read_folder(
    path: Path,
    name: str,
    column: str | None = None,
    unit: str | None = None,
    noised: bool = False,
    labels: Sequence[str] | None = None,
) -> LabeledSet:
    """Read one task of a data folder. Of rows with marked spans, `labels` are those that the configuration declares.

    The values of `column` define natural silos (`Row.group`), those of `unit` say whose a row is (`Row.unit`);
    `noised` as of `target_rows`.
    """
    folder = path / name
    if not folder.is_dir():
        raise InputError(f"data.path: no task {name!r} in {path}; there: {', '.join(task_folders(path))}")
    paths = {split: folder / f"{split}.jsonl" for split in ("train", "validation", "test")}
    records = {split: read_records(file) for split, file in paths.items() if split == "train" or file.exists()}
    if format := find_format(records["train"][0]):
        rows = {split: generation_rows(paths[split], split_records, format) for split, split_records in records.items()}
        meta = _json(folder / "meta.json") if (folder / "meta.json").is_file() else None
        usual = "loss" if format == "preferences" else None
        metric = meta.get("metric", usual) if isinstance(meta, dict) else usual
        culprit = f"data file {folder / 'meta.json'}"
        task = make_task(name, culprit, "generation", metric=None if metric is None else str(metric))
        return LabeledSet(task, _splits(paths, records, rows, column, unit, noised))
    first = records["train"][0]
    if {"query", "passage"} <= first.keys():
        meta = folder / "meta.json"
        metric = (_json(meta) if meta.is_file() else {}).get("metric")
        task = make_task(name, f"data file {meta}", "retrieval", metric=None if metric is None else str(metric))
        queries = {
            split: target_rows(paths[split], own, ("query",), "passage", task, by_index=False, noised=noised)
            for split, own in records.items()
        }
        return LabeledSet(task, _splits(paths, records, queries, column, unit, noised))
    if MARKED_COLUMNS[0] <= first.keys() or MARKED_COLUMNS[1] <= first.keys():
        reading = Reading(paths["train"], ("text",), "spans")
        names = partial(Entities().label_names, reading, records["train"])
        task = _marked_task(name, folder / "meta.json", labels, names, noised)
        marked = {
            split: target_rows(paths[split], own, ("text",), "spans", task, by_index=False, noised=noised)
            for split, own in records.items()
        }
        return LabeledSet(task, _splits(paths, records, marked, column, unit, noised))
    task = _labeled_task(name, folder / "meta.json")
    records = {split: [_without_nul(record) for record in split_records] for split, split_records in records.items()}
    pairs = any("sentence2" in record for record in records["train"])
    text = ("sentence1", "sentence2") if pairs else ("sentence1",)
    rows = {
        split: target_rows(paths[split], split_records, text, "label", task, by_index=True, noised=noised)
        for split, split_records in records.items()
    }
    return LabeledSet(task, _splits(paths, records, rows, column, unit, noised))


MARKED_COLUMNS = ({"tokens", "tags"}, {"text", "spans"})
"""Columns of a data folder's rows with marked spans, either of which shows the kind."""


def _marked_task(
    name: str, path: Path, labels: Sequence[str] | None, names: Callable[[], tuple[str, ...]], noised: bool
) -> Task:
    """Make the task of rows with marked spans; a `meta.json` may declare labels and a metric."""
    meta = _json(path) if path.is_file() else {}
    declared, metric = labels or meta.get("label_names"), meta.get("metric")
    if noised and not declared:
        raise InputError(
            f"data file {path}: 'label_names' are needed beside privacy.unit, as names in rows tell of them"
        )
    classes = tuple(map(str, declared)) if declared else names()
    return make_task(name, f"data file {path}", "entities", classes, None if metric is None else str(metric))


def _without_nul(record: Record) -> Record:
    """Replace NUL characters by blanks; some published texts (mails of Enron) contain them."""
    return {key: value.replace("\0", " ") if isinstance(value, str) else value for key, value in record.items()}


def _splits(
    files: dict[str, Path],
    records: dict[str, list[Record]],
    rows: dict[str, list[Row]],
    column: str | None,
    unit: str | None,
    noised: bool,
) -> Splits:
    """Add the columns of groups and units; only the training rows must have them."""
    splits = dict(rows)
    for split, file in files.items():
        if split not in rows:
            continue
        train, columns = split == "train", records[split][0]
        if train or (unit in columns and not noised):
            splits[split] = with_units(file, records[split], splits[split], unit, noised)
        if train or column in columns:
            splits[split] = with_groups(file, records[split], splits[split], column)
    return Splits(**splits)


def _labeled_task(name: str, path: Path) -> Task:
    """Make the task of rows with labels, numbers or sets of labels, as a `meta.json` describes it."""
    meta, culprit = _meta(path), f"data file {path}"
    labels = tuple(str(label) for label in meta.get("label_names", ()))
    metric = str(meta["metric"]) if "metric" in meta else None
    positive = meta.get("positive") if KINDS[meta["kind"]].one_label else None
    if positive is None and metric == "f1":
        positive = numbered_positive(labels)
    return make_task(name, culprit, meta["kind"], labels, metric, None if positive is None else str(positive))


def _json(path: Path) -> Any:
    try:
        return json.loads(decode_text(path.read_bytes()))
    except ValueError as error:
        raise InputError(f"data file {path}: not JSON ({error})") from error


def _meta(path: Path) -> Record:
    if not path.is_file():
        raise InputError(f"data file {path}: not found (a task folder needs label names)")
    meta = _json(path)
    fields = {"kind": "classification", **meta} if isinstance(meta, dict) else {"kind": "classification"}
    labeled = [kind for kind in KINDS.names if KINDS[kind].labeled]  # the columns tell generation
    if fields["kind"] not in labeled:
        raise unknown_name_error(f"kind of data file {path}", str(fields["kind"]), labeled)
    names, kind = fields.get("label_names"), KINDS[fields["kind"]]
    if not kind.least_labels:
        if names is not None:
            what = f"kind {kind.name}, whose rows are {kind.rows}"
            raise InputError(f"data file {path}: 'label_names' are not of {what}")
    elif not isinstance(names, list) or len(names) < kind.least_labels or len(set(map(str, names))) < len(names):
        raise InputError(
            f"data file {path}: needs 'label_names', a list of at least {kind.least_labels} different names"
        )
    return fields
