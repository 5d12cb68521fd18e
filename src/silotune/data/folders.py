"""Read a task from a data folder: `data.path` with a folder per task, its splits and `meta.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from silotune.config.validators import NAME_RULE, is_name
from silotune.core.files import decode_text
from silotune.data.generation_rows import find_format, generation_rows
from silotune.data.readers import Record, read_records, with_groups, with_units
from silotune.data.rows import LabeledSet, Row, Splits
from silotune.data.targets import target_rows
from silotune.data.tasks import Task, make_task, numbered_positive
from silotune.errors import InputError, unknown_name_error

_KINDS = ("classification", "regression", "multilabel")
"""What `meta.json` may name as `kind`; the columns tell generation."""


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


def read_folder(path: Path, name: str, column: str | None = None, unit: str | None = None) -> LabeledSet:
    """Read one task of a data folder.

    Args:
        path: the data folder.
        name: the task.
        column: column whose values define natural silos; stored as `Row.group`.
        unit: column that says whose a row is; stored as `Row.unit`.
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
        return LabeledSet(task, _splits(paths, records, rows, column, unit))
    task = _labeled_task(name, folder / "meta.json")
    records = {split: [_without_nul(record) for record in split_records] for split, split_records in records.items()}
    pairs = any("sentence2" in record for record in records["train"])
    text = ("sentence1", "sentence2") if pairs else ("sentence1",)
    rows = {
        split: target_rows(paths[split], split_records, text, "label", task, by_index=True)
        for split, split_records in records.items()
    }
    return LabeledSet(task, _splits(paths, records, rows, column, unit))


def _without_nul(record: Record) -> Record:
    """Replace NUL characters by blanks; some published texts (mails of Enron) contain them."""
    return {key: value.replace("\0", " ") if isinstance(value, str) else value for key, value in record.items()}


def _splits(
    files: dict[str, Path],
    records: dict[str, list[Record]],
    rows: dict[str, list[Row]],
    column: str | None,
    unit: str | None,
) -> Splits:
    """Add the columns of groups and units; only the training rows must have them."""
    rows = rows | {"train": with_units(files["train"], records["train"], rows["train"], unit)}
    return Splits(
        **{
            split: with_groups(files[split], records[split], split_rows, column)
            if split == "train" or column in records[split][0]
            else split_rows
            for split, split_rows in rows.items()
        }
    )


def _labeled_task(name: str, path: Path) -> Task:
    """Make the task of rows with labels, numbers or sets of labels, as a `meta.json` describes it."""
    meta, culprit = _meta(path), f"data file {path}"
    labels = tuple(str(label) for label in meta.get("label_names", ()))
    metric = str(meta["metric"]) if "metric" in meta else None
    if meta["kind"] != "classification":
        return make_task(name, culprit, meta["kind"], labels, metric)
    positive = meta.get("positive")
    if positive is None and metric == "f1":
        positive = numbered_positive(labels)
    return make_task(name, culprit, "classification", labels, metric, None if positive is None else str(positive))


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
    if fields["kind"] not in _KINDS:
        raise unknown_name_error(f"kind of data file {path}", str(fields["kind"]), _KINDS)
    names = fields.get("label_names")
    if fields["kind"] == "regression":
        if names is not None:
            raise InputError(f"data file {path}: 'label_names' are not of kind regression, whose rows have numbers")
    elif not isinstance(names, list) or len(names) < 2 or len(set(map(str, names))) < len(names):
        raise InputError(f"data file {path}: needs 'label_names', a list of at least 2 different names")
    return fields
