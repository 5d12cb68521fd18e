"""GLUE's six tasks, from the hub (through `datasets`, played by data sets saved here) and from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from silotune import InputError, read_config
from silotune.data.loading import load_silos
from silotune.data.rows import SiloData

# As published at nyu-mll/glue: configuration, text columns, label names.
PUBLISHED: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "MRPC": ("mrpc", ("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
    "RTE": ("rte", ("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "SST-2": ("sst2", ("sentence",), ("negative", "positive")),
    "QNLI": ("qnli", ("question", "sentence"), ("entailment", "not_entailment")),
    "QQP": ("qqp", ("question1", "question2"), ("not_duplicate", "duplicate")),
    "MNLI": ("mnli", ("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
}
ROWS = {"train": 20, "validation": 10, "test": 5}


def published_split(task: str, split: str, count: int) -> Dataset:
    _, columns, names = PUBLISHED[task]
    hidden = split.startswith("test")  # GLUE keeps its test labels to itself
    table: dict[str, list[Any]] = {column: [f"{split} {column} {i}" for i in range(count)] for column in columns}
    table["label"] = [-1 if hidden else i % len(names) for i in range(count)]
    table["idx"] = list(range(count))
    features = Features(
        {
            **{column: Value("string") for column in columns},
            "label": ClassLabel(names=list(names)),
            "idx": Value("int32"),
        }
    )
    return Dataset.from_dict(table, features=features)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    for task, (configuration, _, _) in PUBLISHED.items():
        splits = dict(ROWS)
        if task == "MNLI":
            splits = {"train": 20} | {
                f"{n}_{kind}": ROWS[n] for n in ("validation", "test") for kind in ("matched", "mismatched")
            }
        DatasetDict({name: published_split(task, name, count) for name, count in splits.items()}).save_to_disk(
            folder / configuration
        )
    return folder


@pytest.fixture
def hub(saved: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The hub, and what was asked of it."""
    asked: list[tuple[object, ...]] = []

    def load_dataset(*words: object, **options: object) -> DatasetDict:
        asked.append((*words, *options.items()))
        return DatasetDict.load_from_disk(saved / str(words[1]))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def loaded(*words: str) -> dict[str, SiloData]:
    return {silo.name: silo for silo in load_silos(read_config("fedmcp-glue", list(words)))}


def test_six_silos_with_the_published_columns_and_label_names(hub: list[tuple[object, ...]]) -> None:
    silos = loaded()
    assert list(silos) == list(PUBLISHED)
    assert hub == [("nyu-mll/glue", configuration) for configuration, _, _ in PUBLISHED.values()]
    for task, (_, columns, names) in PUBLISHED.items():
        assert silos[task].task.labels == names
        splits = silos[task].splits
        assert splits.counts() == {"train": 18, "validation": 6, "test": 6}  # 20 + 10 merged, 6:2:2
        validation = "validation_matched" if task == "MNLI" else "validation"
        expected = {
            (tuple(f"{split} {column} {i}" for column in columns), i % len(names))
            for split, count in (("train", 20), (validation, 10))
            for i in range(count)
        }
        assert {(row.texts, row.label) for row in splits.train + splits.validation + splits.test} == expected


def test_without_merging_validation_is_the_test_and_hidden_labels_are_never_read(hub: list[tuple[object, ...]]) -> None:
    silos = loaded("data.merge=false", "data.tasks=MNLI,SST-2")
    for task, split in (("MNLI", "validation_matched"), ("SST-2", "validation")):
        splits = silos[task].splits
        assert splits.counts() == {"train": 18, "validation": 2, "test": 10}
        assert all(row.texts[0].startswith(split) for row in splits.test)
        assert all(row.label >= 0 for rows in vars(splits).values() for row in rows)


def test_only_the_tasks_asked_for_are_fetched(hub: list[tuple[object, ...]]) -> None:
    assert list(loaded("data.tasks=RTE")) == ["RTE"]
    assert hub == [("nyu-mll/glue", "rte")]


def test_an_unknown_task_is_refused_before_anything_is_fetched(hub: list[tuple[object, ...]]) -> None:
    with pytest.raises(InputError, match=r"'SST2' \(did you mean 'SST-2'\?\)"):
        loaded("data.tasks=MRPC,SST2")
    assert hub == []


def test_a_folder_gives_the_same_silos_as_the_hub(hub: list[tuple[object, ...]], tmp_path: Path) -> None:
    """The same rows laid out as `data.path` wants them: equal silos, row for row."""
    from_hub = loaded()
    for task, (_, columns, names) in PUBLISHED.items():
        (tmp_path / task).mkdir()
        (tmp_path / task / "meta.json").write_text(json.dumps({"label_names": names}), encoding="utf-8")
        validation = "validation_matched" if task == "MNLI" else "validation"
        for file, split, count in (("train", "train", 20), ("validation", validation, 10)):
            records = []
            for i in range(count):
                words = {f"sentence{n + 1}": f"{split} {column} {i}" for n, column in enumerate(columns)}
                records.append(words | {"label": i % len(names)})
            lines = "\n".join(map(json.dumps, records))
            (tmp_path / task / f"{file}.jsonl").write_text(lines, encoding="utf-8")
    asked = len(hub)
    assert loaded(f"data.path={tmp_path}") == from_hub
    assert len(hub) == asked
