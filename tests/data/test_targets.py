"""Numbers and sets of labels in files: which cells are read, how rows travel to a silo's process, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from silotune.data.kinds.multilabel import read_label_set
from silotune.data.kinds.regression import read_number
from silotune.data.loading import load_silos
from silotune.data.own_silos import read_folder
from silotune.data.row_folder import read_rows, write_rows
from silotune.data.rows import Row, SiloData, Splits, known_text
from silotune.data.targets import target_tensor
from silotune.data.tasks import Task, read_task
from silotune.errors import InputError
from silotune.runs.build.resolve import read_config

STS = Task("sts", (), "pearson", "regression")
TOPICS = Task("topics", ("art", "law", "sport"), "micro_f1", "multilabel")


def folder_of(path: Path, meta: dict[str, object], *labels: object) -> Path:
    """A data folder with one task `t`, whose training rows have these labels."""
    (path / "t").mkdir(parents=True)
    (path / "t" / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    lines = [json.dumps({"sentence1": f"text {n}", "label": label}) for n, label in enumerate(labels)]
    (path / "t" / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(("cell", "value"), [(3, 3.0), (2.5, 2.5), (" 1e-3 ", 0.001), ("-4", -4.0), (0, 0.0)])
def test_numbers_are_read(cell: object, value: float) -> None:
    assert read_number(cell, "here") == value


@pytest.mark.parametrize("cell", [True, None, "", "three", "nan", float("inf"), [1.0]])
def test_other_cells_are_no_numbers(cell: object) -> None:
    with pytest.raises(InputError, match=r"^here is no number: .*; kind=regression needs a finite number"):
        read_number(cell, "here")


def test_labels_of_a_cell_are_a_list_or_a_text_with_separators() -> None:
    assert read_label_set("law, art", "here") == ["law", "art"]
    assert read_label_set("law, art", "here", "|") == ["law, art"]
    assert read_label_set("", "here") == read_label_set([], "here") == []
    assert read_label_set([" law ", 2], "here") == ["law", 2]
    for cell in (None, 3, [True], [1.5], [""]):
        with pytest.raises(InputError, match=r"^here holds no labels: "):
            read_label_set(cell, "here")


def test_a_folder_says_its_kind(tmp_path: Path) -> None:
    found = read_folder(folder_of(tmp_path / "a", {"kind": "regression"}, 4.25, 1, "0.5"), "t")
    assert found.task == Task("t", (), "pearson_spearman", "regression")
    assert [row.target for row in found.splits.train] == [4.25, 1.0, 0.5]
    meta = {"kind": "multilabel", "label_names": ["art", "law", "sport"], "metric": "macro_f1"}
    found = read_folder(folder_of(tmp_path / "b", meta, [2, "art"], [], "law"), "t")
    assert found.task == Task("t", ("art", "law", "sport"), "macro_f1", "multilabel")
    assert [row.target for row in found.splits.train] == [(0, 2), (), (1,)]
    assert [known_text(found.task, row) for row in found.splits.train] == ["art, sport", "no label", "law"]
    assert target_tensor(found.task, found.splits.train).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("meta", "label", "said"),
    [
        ({"kind": "regression", "label_names": ["a", "b"]}, 1, "'label_names' are not of kind regression"),
        ({"kind": "regression", "metric": "accuracy"}, 1, "texts with numbers, 'accuracy'.*pearson_spearman"),
        (
            {"kind": "ranking"},
            1,
            "kind of data file .* 'ranking'; allowed: classification, entities, multilabel, regression, retrieval",
        ),
        ({"kind": "multilabel", "label_names": ["a", "b"]}, ["c"], "row 1: 'label': unknown label 'c'; allowed: a, b"),
        ({"kind": "multilabel", "label_names": ["a", "b"]}, [2], "unknown label 2"),
        ({"kind": "multilabel"}, ["a"], "needs 'label_names'"),
    ],
)
def test_what_does_not_fit_is_refused(meta: dict[str, object], label: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        read_folder(folder_of(tmp_path, meta, label), "t")


def test_keys_of_data_know_numbers(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"kind": "regression"}, *(n / 4 for n in range(40)))
    words = [f"data.path={path}", "data.tasks=t", "data.merge=true", "backbone=default"]
    (silo,) = load_silos(read_config("", [*words, "data.metric=mse"]))
    assert (silo.task.metric, silo.splits.counts()) == ("mse", {"train": 24, "validation": 8, "test": 8})
    for word, said in (("data.metric=f1", "texts with numbers"), ("data.positive=x", "'t' has numbers")):
        with pytest.raises(InputError, match=said):
            load_silos(read_config("", [*words, word]))
    with pytest.raises(InputError, match=r"data\.labels: 't' has none, but texts with numbers"):
        load_silos(read_config("", [*words, "data.task=u", "data.labels=[a,b]"]))


@pytest.mark.parametrize(("task", "targets"), [(STS, (0.5, 3.0)), (TOPICS, ((), (0, 2)))])
def test_rows_reach_a_silos_process_as_they_are(task: Task, targets: tuple, tmp_path: Path) -> None:
    rows = [Row((f"text {n}",), 0, target=target) for n, target in enumerate(targets)]
    write_rows(tmp_path, SiloData("a", task, Splits(rows, rows[:1], rows[1:])))
    assert read_rows(tmp_path, "a") == SiloData("a", task, Splits(rows, rows[:1], rows[1:]))
    assert read_task(task.fields()) == task
