"""Keep a silo's rows in a folder of JSON lines that only the silo's own process reads.

`silotune run --engine flower-local` writes one folder per silo.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from silotune.core.files import damage_named, read_json, write_text
from silotune.data.rows import UNREAD, Row, SiloData, Splits
from silotune.data.tasks import Task, UndeclaredLabels, read_task

_TASK = "task.json"

_WEIGHTS = "weights.json"
"""How much each held-out row counts in scores, by split; missing where all count alike."""

_DECLARED = "declared"
"""The key of `task.json` that is true if the label names were declared, and not read from rows."""

_SPLITS = ("train", "validation", "test")

_NAMED = ("unit", "said", "tools")
"""Fields of a row that are written by name."""


def write_rows(folder: Path, data: SiloData, declared: bool = False) -> None:
    """Write a silo's rows and their weights; only the owner of the folder may read them.

    `declared`: its label names were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name in _SPLITS:
        rows: list[Row] = getattr(data.splits, name)
        lines = (json.dumps(_fields(row), ensure_ascii=False) for row in rows)
        write_text(folder / f"{name}.jsonl", "".join(f"{line}\n" for line in lines))
    if data.judged_by_own:
        write_text(folder / _WEIGHTS, json.dumps(data.weights))
    write_text(
        folder / _TASK, json.dumps(data.task.fields() | ({_DECLARED: True} if declared else {}))
    )  # last: marks the folder as complete


def read_rows(folder: Path, silo: str, noised: bool = False) -> SiloData:
    """Read a silo's rows in the order in which they were written; with `noised` only of declared label names."""
    with damage_named(f"rows of silo {silo!r} in {folder}"):
        fields = read_json(folder / _TASK)
        declared = isinstance(fields, dict) and fields.pop(_DECLARED, False) is True
        task = read_task(fields)
        splits = {name: _read(folder / f"{name}.jsonl", task) for name in _SPLITS}
        if not splits["train"]:
            raise ValueError("train.jsonl has no row")
        weights = read_json(folder / _WEIGHTS) if (folder / _WEIGHTS).exists() else {}
    if noised and task.labels and not declared:
        raise UndeclaredLabels(
            f"rows: {folder / _TASK} does not say that its labels were declared, and names read from rows tell which "
            f'ones they have; allowed beside privacy.unit: data with labels, or "{_DECLARED}": true where they were'
        )
    return SiloData(silo, task, Splits(**splits), weights, bool(weights))


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
    for line in path.read_text(encoding="utf-8").split("\n"):  # `splitlines` would split at separators inside a text
        if line:
            texts, known, answer, *more = json.loads(line)
            named = more.pop() if more and isinstance(more[-1], dict) else {}
            turns, rejected, *untrained = more or ([], "")
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in (*texts, answer)):
                raise ValueError(f"{line[:60]} is not a row")
            label, target = _known(task, known)
            row = Row(tuple(texts), label, answer, turns=tuple(map(tuple, turns)), rejected=rejected, target=target)
            unit, extra, tools = (str(named.get(name, "")) for name in _NAMED)
            read_only = tuple(map(int, untrained[0])) if untrained else ()
            rows.append(replace(row, untrained=read_only, unit=unit, said=extra, tools=tools))
    return rows


def _known(task: Task, known: Any) -> tuple[int, float | tuple[Any, ...] | None]:
    """Return `label` and `target` of a row; a folder of a coordinator's labeled rows is written by hand."""
    if type(known) is int and known == UNREAD:
        return UNREAD, None
    result: tuple[int, float | tuple[Any, ...] | None] = task.rules.known(task, known)
    return result
