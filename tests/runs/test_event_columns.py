"""`events.parquet`: events in columns, beside `events.jsonl` and from it."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet
import pytest

import silotune.runs.run
from silotune.runs.storage import event_columns
from silotune.runs.storage.event_columns import COLUMNS_FILE, write_event_columns
from silotune.runs.storage.readers import EVENTS, events

ROWS: list[dict[str, Any]] = [
    {"event": "silo", "round": 1, "silo": "nörd", "loss": 1, "skipped": False, "note": None},
    {"event": "silo", "round": 1, "silo": "süd", "loss": 0.25, "skipped": True, "note": "late", "seconds": 1e-3},
    {"event": "round", "round": 1, "validation": {"nörd": 51.5, "süd": None}, "mixed": 3, "loss": None},
    {"event": "silo", "round": 2, "silo": "süd", "loss": float("nan"), "mixed": "three", "bytes": 2**40},
]


def lines(folder: Path, rows: list[dict[str, Any]], cut: str = "") -> Path:
    (folder / EVENTS).write_text("".join(json.dumps(row) + "\n" for row in rows) + cut, encoding="utf-8")
    return folder


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_row_is_an_event_and_a_column_a_field(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(event_columns, "_AT_ONCE", at_once)
    path = write_event_columns(lines(tmp_path, ROWS, cut='{"event": "si'), least=4)
    assert path == tmp_path / COLUMNS_FILE
    table = pandas.read_parquet(path, dtype_backend="numpy_nullable")
    assert [*table.columns] == [*dict.fromkeys(name for row in ROWS for name in row)]
    kinds = {name: str(table[name].dtype) for name in ("round", "loss", "skipped", "silo", "bytes", "note")}
    assert kinds == {
        "round": "Int64", "loss": "Float64", "skipped": "boolean", "silo": "string", "bytes": "Int64", "note": "string",
    }  # fmt: skip
    assert [*table["round"]] == [1, 1, 1, 2]
    assert table["silo"].to_list()[:2] == ["nörd", "süd"]
    assert table["loss"].to_list()[:2] == [1.0, 0.25]
    assert table["bytes"].to_list()[3] == 2**40
    assert json.loads(table["validation"][2]) == ROWS[2]["validation"]
    assert [json.loads(text) for text in table["mixed"].dropna()] == [3, "three"]
    assert not [*tmp_path.glob(".*.tmp")]


def test_few_events_have_no_columns(tmp_path):
    assert write_event_columns(tmp_path) is None
    lines(tmp_path, ROWS)
    assert write_event_columns(tmp_path, least=5) is None
    assert write_event_columns(tmp_path, least=4) is not None
    assert write_event_columns(tmp_path, least=5) is None  # what a longer run had left
    assert not (tmp_path / COLUMNS_FILE).exists()


def test_numbers_and_texts_that_columns_do_not_hold(tmp_path):
    odd = [
        {"event": "x", "large": 2**63, "mixed": 0.5, "text": "a\ud800b", "nested": {"a": "\ud800"}},
        {"event": "x", "large": 1, "mixed": 2**53 + 1, "text": "c", "nested": []},
    ]
    (tmp_path / EVENTS).write_text("".join(json.dumps(row) + "\n" for row in odd))
    path = write_event_columns(tmp_path, least=2)
    table = pandas.read_parquet(path)
    assert [json.loads(text) for text in table["large"]] == [2**63, 1]
    assert [*table["mixed"]] == [0.5, float(2**53 + 1)]
    assert [*table["text"]] == ["a?b", "c"]
    assert [json.loads(text) for text in table["nested"]] == [{"a": "\ud800"}, []]


def test_much_text_is_not_in_memory_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(event_columns, "_MOST_TEXT", 100)
    path = write_event_columns(lines(tmp_path, [{"event": "x" * 60, "scores": {"a": n}} for n in range(7)]), least=2)
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == 4
    assert [json.loads(text)["a"] for text in pandas.read_parquet(path)["scores"]] == [*range(7)]


@pytest.mark.parametrize("full", [True, False])
def test_a_run_whose_columns_cannot_be_written_is_finished_all_the_same(federate, tmp_path, monkeypatch, full):
    warnings: list[str] = []

    def part(run: Path, path: Path) -> None:
        path.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    def written(run: Path, warn: Any) -> None:
        if full:
            monkeypatch.setattr(event_columns, "_write", part)
        else:
            (run / EVENTS).open("a").write('[1]\n{"event": "last"}\n')
        assert write_event_columns(run, warnings.append, least=1) is None

    monkeypatch.setattr(silotune.runs.run, "write_event_columns", written)
    found = federate.run("fedavg", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["method"] == found.summary["method"]
    assert len(warnings) == 1
    assert "events.parquet is not written" in warnings[0]
    assert not [*(tmp_path / "run").glob("*events.parquet*")]


def test_columns_of_a_shorter_run_do_not_stay(tmp_path):
    lines(tmp_path, ROWS)
    (tmp_path / COLUMNS_FILE).write_bytes(b"old")
    (tmp_path / EVENTS).write_text("3\n" * 9)
    assert write_event_columns(tmp_path, least=4) is None
    assert not (tmp_path / COLUMNS_FILE).exists()


def test_a_run_with_many_events_has_them_in_columns(federate, tmp_path, monkeypatch):
    monkeypatch.setattr(
        silotune.runs.run, "write_event_columns", lambda run, warn: write_event_columns(run, warn, least=3)
    )
    federate.run("fedavg", tmp_path / "run")
    written = [*events(tmp_path / "run")]
    table = pandas.read_parquet(tmp_path / "run" / COLUMNS_FILE)
    assert [*table["event"]] == [event["event"] for event in written]
    silos = table[table["event"] == "silo"]
    assert [*silos["loss"]] == [event["loss"] for event in written if event["event"] == "silo"]
