"""Read published tasks, and silos' own data sets, from the Hugging Face hub."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from silotune.config.paths import HUB_PREFIX
from silotune.data.kinds.regression import number_of
from silotune.data.readers import Record
from silotune.data.rows import LabeledSet, Row, Splits
from silotune.data.tasks import Task, make_task
from silotune.errors import InputError, library_errors


@dataclass(frozen=True)
class HubSet:
    """Location of a task on the hub.

    Args:
        id: data set id.
        configuration: name of its configuration, if it has several.
        texts: names of the text columns, one or two.
        labels: label names by index; None takes the hub's.
        splits: silotune's split name to the hub's.
        numbers: whether `label` holds a number to be predicted.
    """

    id: str
    configuration: str | None
    texts: tuple[str, ...]
    labels: tuple[str, ...] | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    numbers: bool = False


def _glue(name: str, *texts: str, validation: str = "validation", numbers: bool = False) -> HubSet:
    splits = {"train": "train", "validation": validation}  # GLUE's test rows have no labels
    return HubSet("nyu-mll/glue", name.lower().replace("-", ""), texts, splits=splits, numbers=numbers)


GLUE = {
    "MRPC": _glue("MRPC", "sentence1", "sentence2"),
    "RTE": _glue("RTE", "sentence1", "sentence2"),
    "SST-2": _glue("SST-2", "sentence"),
    "CoLA": _glue("CoLA", "sentence"),
    "QNLI": _glue("QNLI", "question", "sentence"),
    "QQP": _glue("QQP", "question1", "question2"),
    "STS-B": _glue("STS-B", "sentence1", "sentence2", numbers=True),
    "MNLI": _glue("MNLI", "premise", "hypothesis", validation="validation_matched"),
}

FEDPROMPT = {
    "imdb": HubSet("stanfordnlp/imdb", None, ("text",), ("negative", "positive")),
    "offenseval": HubSet(
        "cardiffnlp/tweet_eval",
        "offensive",
        ("text",),
        ("NOT", "OFF"),
        {"train": "train", "validation": "validation", "test": "test"},
    ),
    "enron": HubSet("SetFit/enron_spam", None, ("text",), ("ham", "spam")),
}
"""Single-sentence data sets of FedPrompt (section 3.1); the hub has no Ling-Spam of its own."""

HUB: dict[str, dict[str, HubSet]] = {"glue": GLUE, "fedprompt": FEDPROMPT}
"""`data.set` to its tasks on the hub."""


def read_hub_set(name: str, published: HubSet) -> LabeledSet:
    """Download one task through `datasets`; rows without any text are dropped."""
    location = [word for word in (published.id, published.configuration) if word]
    with library_errors(f"data: cannot load {'/'.join(location)}", "; set data.path=FOLDER"):
        loaded = _load(location)
        if published.numbers:
            task = make_task(name, f"data set {name!r}", "regression")
        else:
            task = Task(name, published.labels or tuple(loaded["train"].features["label"].names))
        rows = {split: _rows(loaded[hub_split], published, task) for split, hub_split in published.splits.items()}
    return LabeledSet(task, Splits(**rows))


def read_hub_records(source: str) -> dict[str, list[Record]]:
    """Download a silo's own data set: `hub:OWNER/NAME`, or `hub:OWNER/NAME:CONFIGURATION`.

    Returns:
        Split → records, of the splits train, validation and test that are there.
    """
    location = source.removeprefix(HUB_PREFIX).split(":", 1)
    with library_errors(f"data: cannot load {source}"):
        loaded = _load(location)
    records = {part: loaded[part].to_list() for part in ("train", "validation", "test") if part in loaded}
    if not records.get("train"):
        raise InputError(f"data: {source} has no split 'train' with rows; there: {', '.join(map(str, loaded))}")
    return records


hub_fingerprints: dict[str, dict[str, str]] = {}
"""Data set of the hub that this process has read → split → the fingerprint that `datasets` gives it."""


def _load(location: list[str]) -> Any:
    from datasets import load_dataset

    loaded = load_dataset(*location)
    hub_fingerprints["/".join(location)] = {name: str(getattr(of, "_fingerprint", "")) for name, of in loaded.items()}
    return loaded


def _rows(split: Any, published: HubSet, task: Task) -> list[Row]:
    texts = zip(*(split[column] for column in published.texts), strict=True)
    pairs = zip(texts, split["label"], strict=True)
    if task.kind == "regression":
        rows = [Row(text, 0, target=float(number)) for text, number in pairs]
        if not all(math.isfinite(number_of(row)) for row in rows):
            raise ValueError("a label that is no finite number")
    else:
        rows = [Row(text, int(label)) for text, label in pairs]
        if not all(0 <= row.label < len(task.labels) for row in rows):
            raise ValueError(f"a label outside 0 to {len(task.labels) - 1}")
    return [row for row in rows if any(text.strip() for text in row.texts)]
