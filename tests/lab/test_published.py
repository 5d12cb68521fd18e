"""Data sets in the layouts that their authors distribute, made here in small, and what is wrong with such folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from silotune.data.own_silos import read_folder
from silotune.data.rows import known_text
from tests.support.command_line import Silotune

TEST_FILE = "flan_test_200_selected_nstrict_1.jsonl"


def written(path: Path, text: str, encoding: str = "utf-8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))


def instructions(task: str, count: int) -> list[dict[str, str]]:
    return [
        {"instruction": f"{task}\u2028say {n}", "output": str(n), "task": task, "category": "say"} for n in range(count)
    ]


def feddpa(folder: Path) -> None:
    for number, tasks in ((1, ("snli", "cola")), (2, ("qnli",))):
        place = folder / "data" / f"dataset{number}"
        for silo, task in enumerate(tasks):
            written(place / "8" / f"local_training_{silo}.json", json.dumps(instructions(task, 3)))
        rows = [row for task in tasks for row in instructions(task, 2)]
        written(place / TEST_FILE, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def lingspam(folder: Path) -> None:
    for part in range(1, 11):
        written(folder / "lingspam_public" / "bare" / f"part{part}" / "3-1msg1.txt", f"ham {part}")
        written(folder / "lingspam_public" / "bare" / f"part{part}" / "spmsga1.txt", f"spam\0{part}")


MAKERS: dict[str, Callable[[Path], None]] = {maker.__name__: maker for maker in (feddpa, lingspam)}
EXPECTED = {
    "snli": {"train": [(("snli\u2028say 0", ""), "0"), (("snli\u2028say 1", ""), "1"), (("snli\u2028say 2", ""), "2")]},
    "cola": {"test": [(("cola\u2028say 0", ""), "0"), (("cola\u2028say 1", ""), "1")]},
    "qnli": {"test": [(("qnli\u2028say 0", ""), "0"), (("qnli\u2028say 1", ""), "1")]},
    "lingspam": {"test": [((f"{kind} {part}",), kind) for part in (9, 10) for kind in ("ham", "spam")]},
}


@pytest.mark.parametrize("kind", MAKERS)
def test_rows_and_labels_are_those_of_the_files(kind: str, silotune: Silotune, tmp_path: Path) -> None:
    MAKERS[kind](tmp_path / "source")
    outcome = silotune("import-data", kind, tmp_path / "source", "--to", tmp_path / "data")
    assert (outcome.code, outcome.err) == (0, "")
    tasks = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert len(tasks) == {"feddpa": 3, "lingspam": 1}[kind]
    for task in tasks:
        found = read_folder(tmp_path / "data", task)
        for split, rows in EXPECTED.get(task, {}).items():
            assert [(row.texts, known_text(found.task, row)) for row in getattr(found.splits, split)] == rows
    again = silotune("import-data", kind, tmp_path / "source", "--to", tmp_path / "data")
    again.refusal("already; choose another folder")


def test_a_task_whose_name_is_a_path_is_refused(silotune: Silotune, tmp_path: Path) -> None:
    MAKERS["feddpa"](tmp_path / "source")
    written(tmp_path / "source/data/dataset2/8/local_training_0.json", json.dumps(instructions("../c", 1)))
    outcome = silotune("import-data", "feddpa", tmp_path / "source", "--to", tmp_path / "data")
    outcome.refusal("'../c' cannot be a name")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", MAKERS)
def test_an_empty_folder_is_refused(kind: str, silotune: Silotune, tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "absent"):
        outcome = silotune("import-data", kind, source, "--to", tmp_path / "data")
        outcome.refusal()
    assert "unknown kind of data 'gleu'" in silotune("import-data", "gleu", tmp_path, "--to", tmp_path / "data").err
