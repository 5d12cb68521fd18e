"""`write_tasks` writes published tasks as folders of `data.path`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from silotune.core.files import make_folder
from silotune.errors import InputError
from silotune.lab.published import PublishedTask


def write_tasks(tasks: Sequence[PublishedTask], folder: Path) -> None:
    """Write a folder for each task; none is there unless it is whole.

    Args:
        tasks: the tasks.
        folder: the data folder; other tasks in it stay.
    """
    for task in tasks:
        if (folder / task.name).exists():
            raise InputError(f"--to {folder}: has a {task.name} already; choose another folder")
    make_folder(folder, f"--to {folder}")
    for task in tasks:
        unfinished = folder / f".{task.name}.tmp"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            if task.meta:
                (unfinished / "meta.json").write_text(json.dumps(task.meta) + "\n", encoding="utf-8")
            for split, rows in task.splits.items():
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (unfinished / f"{split}.jsonl").write_text(lines, encoding="utf-8")
            unfinished.replace(folder / task.name)
        except OSError as error:
            raise InputError(f"--to {folder}: cannot be written ({error.strerror})") from error
