"""Labelled data sets as folders (`<set>/<task>/{train,validation,test}.jsonl` + `meta.json`) or from the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from silotune.data.files import Record, read_records, rows_of
from silotune.data.tasks import Row, Splits, Task
from silotune.errors import InputError

GLUE_HUB = "nyu-mll/glue"
GLUE_TEXT = {
    "MRPC": ("sentence1", "sentence2"),
    "RTE": ("sentence1", "sentence2"),
    "SST-2": ("sentence",),
    "CoLA": ("sentence",),
    "QNLI": ("question", "sentence"),
    "QQP": ("question1", "question2"),
    "MNLI": ("premise", "hypothesis"),
}
"""The text columns of the hub's GLUE, by task."""


@dataclass(frozen=True)
class LabelledSet:
    """A task and its splits as published."""

    task: Task
    splits: Splits


def task_folders(path: Path) -> list[str]:
    """The task names found in a data folder.

    Raises:
        InputError: if it is no folder or holds no task.
    """
    if not path.is_dir():
        raise InputError(f"data.path: {path} is not a folder")
    names = sorted(entry.name for entry in path.iterdir() if (entry / "train.jsonl").is_file())
    if not names:
        raise InputError(f"data.path: no task folder with a train.jsonl in {path}")
    return names


def read_folder(path: Path, name: str) -> LabelledSet:
    """One task of a data folder.

    Raises:
        InputError: if the task is not there or its files are malformed.
    """
    folder = path / name
    if not folder.is_dir():
        raise InputError(f"data.path: no task {name!r} in {path}; there: {', '.join(task_folders(path))}")
    meta = _meta(folder / "meta.json")
    labels = tuple(str(label) for label in meta["label_names"])
    task = Task(name, labels, str(meta.get("metric", "accuracy")))
    found: dict[str, list[Row]] = {}
    for split in ("train", "validation", "test"):
        file = folder / f"{split}.jsonl"
        if split == "train" or file.exists():
            records = read_records(file)
            found[split] = rows_of(file, records, _text_columns(records[0]), "label", labels, by_index=True)
    return LabelledSet(task, Splits(**found))


def _meta(path: Path) -> Record:
    if not path.is_file():
        raise InputError(f"data file {path}: not found (a task folder needs label names)")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"data file {path}: not JSON ({error})") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("label_names"), list):
        raise InputError(f"data file {path}: needs a list 'label_names'")
    return meta


def _text_columns(record: Record) -> tuple[str, ...]:
    return ("sentence1", "sentence2") if "sentence2" in record else ("sentence1",)


def read_glue_hub(name: str) -> LabelledSet:
    """One GLUE task from the Hugging Face hub through `datasets`; validation is MNLI's matched one.

    Raises:
        InputError: for an unknown task, or if the hub cannot be reached.
    """
    if name not in GLUE_TEXT:
        raise InputError(f"data: no GLUE task {name!r}; allowed: {', '.join(GLUE_TEXT)}")
    from datasets import load_dataset

    configuration = name.lower().replace("-", "")
    try:
        loaded = load_dataset(GLUE_HUB, configuration)
    except Exception as error:  # the hub's client raises many kinds; all mean the same to a user
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"data: cannot load {GLUE_HUB}/{configuration} ({reason}); set data.path=FOLDER") from error
    validation = "validation_matched" if name == "MNLI" else "validation"
    names = tuple(loaded["train"].features["label"].names)

    def rows(split: str) -> list[Row]:
        return [Row(tuple(row[column] for column in GLUE_TEXT[name]), row["label"]) for row in loaded[split]]

    return LabelledSet(Task(name, names), Splits(train=rows("train"), validation=rows(validation)))
