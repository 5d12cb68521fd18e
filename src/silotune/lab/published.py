"""Convert data sets that the hub lacks from their authors' folders to folders of `data.path` (docs/data.md)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silotune.config.validators import NAME_RULE, is_name
from silotune.core.files import make_folder
from silotune.data.readers import Record, read_records
from silotune.errors import InputError


@dataclass(frozen=True)
class PublishedTask:
    """A task as it was published: its folder's name, its splits and its label names, if rows have labels."""

    name: str
    splits: Mapping[str, Sequence[Record]]
    labels: Sequence[str] = ()


def read_feddpa(source: Path) -> list[PublishedTask]:
    """Read the authors' `data/dataset1` and `dataset2`, or one of them: eight silos' files and a test file each."""
    tests = sorted(source.rglob("flan_test_200_selected_nstrict_1.jsonl"))
    if not tests:
        raise InputError(
            f"{source}: no flan_test_200_selected_nstrict_1.jsonl in it or below, as Lydia-yang/FedDPA has"
        )
    tasks: list[PublishedTask] = []
    for test in tests:
        tested = _by_task(test, read_records(test))
        for file in sorted((test.parent / "8").glob("local_training_*.json")):
            for name, rows in _by_task(file, _read_json(file)).items():
                if name not in tested:
                    raise InputError(f"{test}: no row of task {name!r}, which {file.name} trains")
                tasks.append(PublishedTask(name, {"train": rows, "test": tested[name]}))
    if not tasks:
        raise InputError(f"{tests[0].parent / '8'}: no local_training_*.json")
    return tasks


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not JSON ({error})") from error


def _by_task(path: Path, rows: Any) -> dict[str, list[Record]]:
    keys = ("instruction", "output", "task")
    tasks: dict[str, list[Record]] = {}
    for number, row in enumerate(rows if isinstance(rows, list) else [None], start=1):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
            raise InputError(f"{path}: row {number}: needs the texts {', '.join(keys)}")
        if not is_name(row["task"]):
            raise InputError(f"{path}: row {number}: task {row['task']!r} cannot be a name; allowed: {NAME_RULE}")
        tasks.setdefault(row["task"], []).append(
            {"instruction": row["instruction"], "input": "", "output": row["output"]}
        )
    return tasks


def read_lingspam(source: Path) -> list[PublishedTask]:
    """Read `lingspam_public/bare` (or the folder with `part1` to `part10`): parts 9 and 10 are tested.

    Files whose names begin with spmsg are spam; the names of the others begin with numbers.
    """
    places = (source, source / "bare", source / "lingspam_public" / "bare")
    place = next((path for path in places if (path / "part1").is_dir()), None)
    if place is None:
        raise InputError(f"{source}: no part1 in it, in bare or in lingspam_public/bare")

    def rows(parts: Iterable[int]) -> list[Record]:
        files = [(label, file) for part in parts for label in (0, 1) for file in _mails(place / f"part{part}", label)]
        texts = [(label, file.read_text(encoding="latin-1").replace("\0", " ")) for label, file in files]
        return [{"sentence1": text, "label": label} for label, text in texts if text.strip()]

    return [PublishedTask("lingspam", {"train": rows(range(1, 9)), "test": rows((9, 10))}, ("ham", "spam"))]


def _mails(folder: Path, label: int) -> list[Path]:
    files = sorted(folder.glob(("[!s]*.txt", "spmsg*.txt")[label]))
    if not files:
        raise InputError(f"{folder}: no {('ham', 'spam')[label]} there")
    return files


PUBLISHED: dict[str, Callable[[Path], list[PublishedTask]]] = {"feddpa": read_feddpa, "lingspam": read_lingspam}
"""Kind → reader of the folder that was downloaded and unpacked."""


def write_tasks(tasks: Sequence[PublishedTask], folder: Path) -> None:
    """Write a folder for each task, which is there only if it is whole; other tasks in the folder stay."""
    for task in tasks:
        if (folder / task.name).exists():
            raise InputError(f"--to {folder}: has a {task.name} already; choose another folder")
    make_folder(folder, f"--to {folder}")
    for task in tasks:
        unfinished = folder / f".{task.name}.tmp"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            if task.labels:
                meta = json.dumps({"label_names": list(task.labels)})
                (unfinished / "meta.json").write_text(meta + "\n", encoding="utf-8")
            for split, rows in task.splits.items():
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (unfinished / f"{split}.jsonl").write_text(lines, encoding="utf-8")
            unfinished.replace(folder / task.name)
        except OSError as error:
            raise InputError(f"--to {folder}: cannot be written ({error.strerror})") from error
