"""The same rows in CSV, TSV, JSON lines and Parquet are the same data."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import is_normalized, normalize

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from safetensors.numpy import load_file

import silotune as package
from silotune import read_config
from silotune.config import dump
from silotune.data.generation_rows import asked_row, generation_rows
from silotune.data.loading import load_silos
from silotune.data.readers import label_names
from silotune.data.rows import Row
from tests.support.command_line import Silotune

HEADER = ("question", "reply", "id", "verdict")
NASTY = [
    'she said "no", twice',
    "two\nlines",
    "a\ttab",
    "  blanks around  ",
    "naïve café, 北京, 😀",
    "\u2028 a line separator",
    "'; drop table",
    "nan",
    "None",
    "0",
]
ROWS = [(f"{NASTY[i % 10]} {i}", NASTY[(i + 3) % 10], i, ("yes", "no", "not sure")[i % 3]) for i in range(60)]

Writer = Callable[[Path, Sequence[str], Sequence[Sequence[Any]]], None]


def write_separated(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8-sig" if path.name.startswith("bom") else "utf-8", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",").writerows([header, *rows])


def write_json_lines(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    lines = [json.dumps(dict(zip(header, row, strict=True)), ensure_ascii=len(row[0]) % 2 == 0) for row in rows]
    path.write_text("\n\n".join(lines), encoding="utf-8")  # blank lines and a missing last newline are fine


def write_parquet(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)]
    pyarrow.parquet.write_table(pyarrow.table(dict(zip(header, columns, strict=True))), path)


FILES: dict[str, Writer] = {
    "rows.csv": write_separated,
    "bom.csv": write_separated,
    "ROWS.CSV": write_separated,
    "rows.tsv": write_separated,
    "rows.jsonl": write_json_lines,
    "rows.parquet": write_parquet,
}


def federation(place: Path, silos: Sequence[dict[str, Any]], **keys: Any) -> Path:
    path = place / "own.yaml"
    path.write_text(yaml.safe_dump({"silos": list(silos), "threads": 1, "rounds": 1, **keys}), encoding="utf-8")
    return path


def rows_of(path: Path) -> tuple[tuple[str, ...], list[Row]]:
    (silo,) = load_silos(read_config(str(path)))
    return silo.task.labels, [row for part in vars(silo.splits).values() for row in part]


def decomposed(text: str) -> str:
    return normalize("NFD", text)


@pytest.mark.parametrize("form", [str, decomposed])
@pytest.mark.parametrize(("name", "write"), FILES.items(), ids=FILES)
def test_every_row_arrives_as_it_was_written_but_in_one_form(
    place: Path, name: str, write: Writer, form: Callable[[str], str]
) -> None:
    write(place / name, HEADER, [(form(q), form(r), *others) for q, r, *others in ROWS])
    silo = {"name": "a", "path": name, "text": ["question", "reply"], "label": "verdict"}
    labels, rows = rows_of(federation(place, [silo]))
    assert labels == ("no", "not sure", "yes")
    assert sorted((*row.texts, labels[row.label]) for row in rows) == sorted((q, r, v) for q, r, _, v in ROWS)


def test_all_that_a_model_reads_is_in_one_form(place: Path) -> None:
    word = decomposed("café")
    turns = [{"role": role, "content": word} for role in ("system", "user", "assistant")]
    for record, format in (
        ({"messages": turns}, "conversations"),
        ({"prompt": turns[:2], "chosen": word, "rejected": "no"}, "preferences"),
        ({"prompt": "why", "chosen": [turns[2]], "rejected": [{"role": "assistant", "content": "no"}]}, "preferences"),
        ({"instruction": word, "input": word, "output": word}, "instructions"),
        ({"prompt": word, "response": word}, "prompts"),
    ):
        (row,) = generation_rows(Path("rows.jsonl"), [record], format)
        said = json.dumps([row.texts, row.turns, row.answer, row.rejected], ensure_ascii=False)
        assert "café" in said
        assert is_normalized("NFC", said)
    assert asked_row(turns[:2], "predict").turns[1] == ("user", "café")
    assert replace(Row(("a",), 0), unit=word, group=word) == Row(("a",), 0, unit="café", group="café")
    silo = {"name": "a", "path": "rows.csv", "labels": [word, "b"], "positive": word, "metric": "f1"}
    head = {"name": "verbalizer", "template": f"{word} {{mask}} {{text}}", "words": {word: [word], "b": ["b"]}}
    config = read_config(str(federation(place, [silo], head=head)))
    said = dump(config)
    assert said.count("café") == 5
    assert is_normalized("NFC", said)


INTEGERS = {
    "a.csv": (write_separated, ["0", "10", "2"]),
    "a.jsonl": (write_json_lines, [0, 10, 2]),
    "floats.jsonl": (write_json_lines, [0.0, 10.0, 2.0]),
    "a.parquet": (write_parquet, [0, 10, 2]),
    "floats.parquet": (write_parquet, [0.0, 10.0, 2.0]),  # what a column of integers with a gap becomes in pandas
}


@pytest.mark.parametrize(("name", "written"), INTEGERS.items(), ids=INTEGERS)
def test_whole_numbers_are_label_names_in_numeric_order(
    place: Path, name: str, written: tuple[Writer, list[Any]]
) -> None:
    write, values = written
    write(place / name, ("text", "label"), [(f"text {i}", values[i % 3]) for i in range(30)])
    labels, rows = rows_of(federation(place, [{"name": "a", "path": name}]))
    assert labels == ("0", "2", "10")
    assert {(row.texts[0], labels[row.label]) for row in rows} == {
        (f"text {i}", ("0", "10", "2")[i % 3]) for i in range(30)
    }


@pytest.mark.parametrize(
    ("written", "names"),
    [
        (["①", "②"], ("①", "②")),
        (["²", "10"], ("10", "²")),
        (["--1", "0"], ("--1", "0")),
        (["1" * 5000, "0"], ("0", "1" * 5000)),
        (["-2", "10", "3", "-10"], ("-10", "-2", "3", "10")),
        (["1", "0001", "01", "001"], ("0001", "001", "01", "1")),
    ],
    ids=["circled", "superscript", "two signs", "too long for a number", "negative", "one number"],
)
def test_label_names_have_one_order_whatever_they_look_like(written: list[str], names: tuple[str, ...]) -> None:
    assert label_names(written) == names


def test_declared_labels_keep_their_order_and_may_be_more_than_are_seen(place: Path) -> None:
    write_separated(place / "a.csv", ("text", "label"), [(f"text {i}", i % 2) for i in range(20)])
    silo = {"name": "a", "path": "a.csv", "labels": [2, 1, 0]}
    labels, rows = rows_of(federation(place, [silo]))
    assert labels == ("2", "1", "0")
    assert {row.label for row in rows} == {1, 2}


def test_blanks_around_a_label_are_no_part_of_it(place: Path) -> None:
    write_separated(place / "a.csv", ("text", "label"), [(f"t {i}", ("up", "up ", "down")[i % 3]) for i in range(30)])
    assert rows_of(federation(place, [{"name": "a", "path": "a.csv"}]))[0] == ("down", "up")


def test_silos_of_one_task_share_the_labels_of_all(place: Path) -> None:
    write_separated(place / "a.csv", ("text", "label"), [(f"t {i}", "AB"[i % 2]) for i in range(20)])
    write_separated(place / "b.csv", ("text", "label"), [(f"t {i}", "BC"[i % 2]) for i in range(20)])
    silos = [{"name": name, "path": f"{name}.csv", "task": "letters"} for name in "ab"]
    first, second = load_silos(read_config(str(federation(place, silos))))
    assert first.task == second.task
    assert first.task.labels == ("A", "B", "C")


class TestFolder:
    """A folder with train, validation and test files is taken as it is split."""

    @pytest.fixture
    def folder(self, place: Path) -> Path:
        path = place / "own"
        path.mkdir()
        write_separated(path / "train.csv", HEADER, ROWS[:30])
        write_json_lines(path / "validation.jsonl", HEADER, ROWS[30:40])
        write_parquet(path / "test.parquet", HEADER, ROWS[40:])
        return path

    def splits(self, place: Path, **data: Any) -> dict[str, set[str]]:
        silo = {"name": "a", "path": "own", "text": "question", "label": "verdict"}
        (found,) = load_silos(read_config(str(federation(place, [silo], data=data))))
        return {name: {row.texts[0] for row in rows} for name, rows in vars(found.splits).items()}

    def test_ready_splits_stay(self, place: Path, folder: Path) -> None:
        texts = [row[0] for row in ROWS]
        assert self.splits(place) == {
            "train": set(texts[:30]),
            "validation": set(texts[30:40]),
            "test": set(texts[40:]),
        }

    def test_train_alone_is_split_as_a_file_is(self, place: Path, folder: Path) -> None:
        (folder / "validation.jsonl").unlink()
        (folder / "test.parquet").unlink()
        found = self.splits(place)
        assert {name: len(texts) for name, texts in found.items()} == {"train": 18, "validation": 6, "test": 6}

    def test_other_files_in_it_are_left_alone(self, place: Path, folder: Path) -> None:
        (folder / "train.md").write_text("notes", encoding="utf-8")
        (folder / "README").write_text("notes", encoding="utf-8")
        assert len(self.splits(place)["train"]) == 30


def test_heads_are_sized_from_the_data_and_answer_with_its_names(
    silotune: Silotune, place: Path, backbone_folder: Callable[[str], Path]
) -> None:
    write_separated(place / "three.csv", HEADER, ROWS)
    write_separated(place / "two.csv", ("text", "label"), [(f"text {i}", i % 2) for i in range(20)])
    silos = [
        {"name": "three", "path": "three.csv", "text": ["question", "reply"], "label": "verdict"},
        {"name": "two", "path": "two.csv"},
    ]
    path = federation(
        place, silos, method="local", backbone=str(backbone_folder("bert")), train={"max_length": 32}, precision="fp32"
    )
    run = package.run(str(path), out=place / "out")
    (yes,) = run.model("three").predict([("is it?", "it is")])
    assert set(yes.probabilities) == {"yes", "no", "not sure"}
    assert sum(yes.probabilities.values()) == pytest.approx(1, abs=1e-5)
    assert yes.label == max(yes.probabilities, key=lambda name: yes.probabilities[name])
    (zero,) = run.model("two").predict(["text 0"])
    assert set(zero.probabilities) == {"0", "1"}
    for silo, classes in (("three", 3), ("two", 2)):
        tensors = load_file(place / "out" / "checkpoints" / "silos" / silo / "0001.safetensors")
        heads = [tensor.shape for name, tensor in tensors.items() if name.endswith(".out.weight")]
        assert heads == [(classes, 32)]
