"""Rows of queries and passages are read from columns and folders; what does not fit is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from silotune.config.data import SiloConfig
from silotune.data.kinds.retrieval import ranked_among
from silotune.data.own_silos import own_sets, read_folder
from silotune.data.row_folder import read_rows, write_rows
from silotune.data.rows import Row, SiloData
from silotune.errors import InputError

ROWS: list[dict[str, Any]] = [
    {"query": "cafe\u0301?", "passage": "a cafe\u0301", "negatives": ["no", "none"]},
    {"query": "b?", "passage": "b", "negatives": None},
]
READ = [Row(("café?",), 0, target=("a café", ("no", "none"), ())), Row(("b?",), 0, target=("b", (), ()))]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def own(path: Path, **more: Any) -> Any:
    return own_sets([SiloConfig(name="a", path=str(path), kind="retrieval", **more)], None)["a"]


def test_rows_of_files_and_folders(tmp_path: Path) -> None:
    found = own(write(tmp_path / "r.jsonl", ROWS))
    assert (found.task.kind, found.task.metric, found.splits.train) == ("retrieval", "ndcg10", READ)
    renamed = [{"text": row["query"], "label": row["passage"], "negatives": row["negatives"]} for row in ROWS]
    assert own(write(tmp_path / "n.jsonl", renamed)).splits.train == READ
    (tmp_path / "r.csv").write_text('query,passage,negatives\ncafé?,a café,"[""no"", ""none""]"\nb?,b,\n')
    assert own(tmp_path / "r.csv").splits.train == READ
    write(tmp_path / "t" / "train.jsonl", ROWS)
    assert read_folder(tmp_path, "t").splits.train == READ


def test_further_passages_reach_test_rows_and_the_silos_folder(tmp_path: Path) -> None:
    passages = write(tmp_path / "p.jsonl", [{"passage": text} for text in ("x", "y", "x", "z")])
    found = own(write(tmp_path / "r.jsonl", ROWS), passages=str(passages))
    assert found.passages == ("x", "y", "z")
    found.splits.test = ranked_among(READ, found.passages)
    assert [row.target[2] for row in found.splits.test] == [("x", "z"), ("y",)]
    data = SiloData("a", found.task, found.splits)
    write_rows(tmp_path / "silo", data)
    assert read_rows(tmp_path / "silo", "a").splits == data.splits


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"query": "a", "passage": " "}, "'passage' is empty"),
        ({"query": "a", "passage": "b", "negatives": [3]}, "'negatives': a passage is no text: 3"),
        ({"query": "a", "passage": "b", "negatives": [""]}, "'negatives': a passage is empty"),
        ({"query": "a", "passage": "b", "negatives": "[x"}, "'negatives': not JSON"),
        ({"query": "a", "text": "b"}, "no column 'passage'"),
    ],
)
def test_what_does_not_fit_is_a_line(row: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=line):
        own(write(tmp_path / "r.jsonl", [row]))
    for key, kind in ((("labels", ["a", "b"]), "retrieval"), (("passages", "p.csv"), "classification")):
        with pytest.raises(ValueError, match="retrieval"):
            SiloConfig(name="a", path="r.jsonl", kind=kind, **dict([key]))
