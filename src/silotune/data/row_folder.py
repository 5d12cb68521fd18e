"""Keep a silo's rows in a folder of JSON lines that only the silo's own process reads.

`silotune run --engine flower-local` writes one folder per silo.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from silotune.core.files import write_text
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task, read_task
from silotune.errors import InputError

_TASK = "task.json"

_SPLITS = ("train", "validation", "test")

_NAMED = ("unit", "said", "tools")
"""Fields of a row that are written by name."""


def write_rows(folder: Path, data: SiloData) -> None:
    """Write a silo's rows; only the owner of the folder may read them."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name in _SPLITS:
        rows: list[Row] = getattr(data.splits, name)
        lines = (json.dumps(_fields(row), ensure_ascii=False) for row in rows)
        write_text(folder / f"{name}.jsonl", "".join(f"{line}\n" for line in lines))
    write_text(folder / _TASK, json.dumps(data.task.fields()))  # last: marks the folder as complete


def read_rows(folder: Path, silo: str) -> SiloData:
    """Read a silo's rows in the order in which they were written."""
    try:
        task = read_task(json.loads((folder / _TASK).read_text(encoding="utf-8")))
        splits = {name: _read(folder / f"{name}.jsonl", task) for name in _SPLITS}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"rows of silo {silo!r} in {os.fspath(folder)}: missing or damaged ({error})") from error
    if not splits["train"]:
        raise InputError(f"rows of silo {silo!r} in {os.fspath(folder)}: train.jsonl has no row")
    return SiloData(silo, task, Splits(**splits))


def _fields(row: Row) -> list[Any]:
    """Return a row as a JSON list: texts; label, number or labels; answer; more fields for conversations and pairs.

    The unit of the row, its tools and the answer's further keys, if any, are an object at the end.
    """
    more: list[Any] = [[list(turn) for turn in row.turns], row.rejected] if row.turns or row.rejected else []
    more += [list(row.untrained)] if row.untrained else []
    named = {name: getattr(row, name) for name in _NAMED if getattr(row, name)}
    return [list(row.texts), row.known, row.answer, *more, *([named] if named else [])]


def _read(path: Path, task: Task) -> list[Row]:
    rows = []
    lines = path.read_text(encoding="utf-8").split("\n")  # `splitlines` would also split at separators inside a text
    for number, line in enumerate(lines, start=1):
        if line:
            texts, known, answer, *more = json.loads(line)
            named = more.pop() if more and isinstance(more[-1], dict) else {}
            turns, rejected, *untrained = more or ([], "")
            if not isinstance(texts, list) or not 1 <= len(texts) <= 2 or not _are_texts([*texts, answer, rejected]):
                raise ValueError(f"{path.name}: line {number}: not the texts of a row")
            label, target = _known(task, known, f"{path.name}: line {number}")
            if not all(isinstance(turn, list) and len(turn) in (2, 3) and _are_texts(turn) for turn in turns):
                raise ValueError(f"{path.name}: line {number}: not the turns of a conversation")
            row = Row(tuple(texts), label, answer, turns=tuple(map(tuple, turns)), rejected=rejected, target=target)
            unit, said, tools = (str(named.get(name, "")) for name in _NAMED)
            row = replace(row, unit=unit, said=said, tools=tools)
            rows.append(replace(row, untrained=tuple(map(int, untrained[0]))) if untrained else row)
    return rows


def _known(task: Task, known: Any, where: str) -> tuple[int, float | tuple[int, ...] | None]:
    """Return `label` and `target` of a row."""
    indices = known if isinstance(known, list) else [known]
    if task.kind == "regression" and type(known) is float and math.isfinite(known):
        return 0, known
    inside = all(type(index) is int and (not task.labels or 0 <= index < len(task.labels)) for index in indices)
    if task.kind == "regression" or not inside or isinstance(known, list) != (task.kind == "multilabel"):
        raise ValueError(f"{where}: label {known!r}")
    return (0, tuple(indices)) if task.kind == "multilabel" else (indices[0], None)


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
