"""Malformed data ends with code 2 and one line that names file, row, column or silo; nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from tests.support.command_line import Refused, change_silo, reviews, write_csv

RUN = ("run", "federation.yaml", "--out", "out")
GOOD = "\n".join(["review,opinion", *(f"{text},{label}" for text, label in reviews())]) + "\n"
LINES = [json.dumps({"review": text, "opinion": label}) for text, label in reviews()]


def with_line(number: int, line: str) -> str:
    """The good CSV with one line (the header is 0) replaced."""
    lines = GOOD.splitlines()
    lines[number] = line
    return "\n".join(lines) + "\n"


def with_record(number: int, line: str) -> str:
    """The good JSON lines with one (from 0) replaced."""
    return "\n".join([*LINES[:number], line, *LINES[number + 1 :]]) + "\n"


# name: (file of silo north, content, what the line must say)
SINGLE: dict[str, tuple[str, str | bytes, list[str]]] = {
    "no-text-column": ("north.csv", with_line(0, "text,opinion"), ["north.csv", "'review'", "opinion, text"]),
    "empty-file": ("north.csv", "", ["north.csv", "empty"]),
    "header-only": ("north.csv", "review,opinion\n", ["north.csv", "no rows"]),
    "column-twice": ("north.csv", with_line(0, "review,review"), ["north.csv", "'review'", "twice"]),
    "row-too-long": ("north.csv", with_line(7, "fine, I think,good"), ["north.csv", "row 7", "3 columns", "2"]),
    "open-quote": ("north.csv", with_line(7, '"fine,good'), ["north.csv", "line", "end of data"]),
    "empty-text": ("north.csv", with_line(5, ",good"), ["north.csv", "row 5", "'review'", "empty"]),
    "blank-label": ("north.csv", with_line(5, "fine,  "), ["north.csv", "row 5", "'opinion'", "label"]),
    "one-class": ("north.csv", GOOD.replace(",bad", ",good"), ["'north'", "one class", "'good'", "2"]),
    "not-utf8": ("north.csv", GOOD.encode() + b"caf\xe9,good\n", ["north.csv", "line 22", "UTF-8"]),
    "nul": ("north.csv", with_line(7, "a\0b,good"), ["north.csv", "row 7", "'review'", "NUL"]),
    "too-few-rows": ("north.csv", "review,opinion\na,good\nb,bad\n", ["'north'", "2 rows", "0.6:0.2:0.2"]),
    "unknown-format": ("north.txt", GOOD, ["north.txt", "'.txt'", ".csv", ".jsonl", ".parquet"]),
    "tsv-with-commas": ("north.tsv", GOOD, ["north.tsv", "no column", "review,opinion"]),
    "bad-json": ("north.jsonl", with_record(2, '{"review": "fine", '), ["north.jsonl", "line 3", "JSON"]),
    "json-array": ("north.jsonl", with_record(2, '["fine", "good"]'), ["north.jsonl", "line 3", "object"]),
    "json-too-deep": ("north.jsonl", with_record(2, "[" * 100_000), ["north.jsonl", "line 3", "JSON"]),
    "semicolons": (
        "north.csv",
        "review;opinion\na, b;good\n",
        ["north.csv", "row 1 has 2 columns, the header 1", "'review;opinion'", "column_separator: ';'"],
    ),
    "semicolons-and-quotes": ("north.csv", 'review;opinion\n"a";good\n', ["north.csv", "column_separator: ';'"]),
    "quoted-header": ("north.csv", '"review";"opinion"\na;good\n', ["north.csv", "line 1", "column_separator: ';'"]),
    "semicolons-alone": ("north.csv", "review;opinion\na;good\n", ["no column 'review'", "column_separator: ';'"]),
    "whole-array": ("north.jsonl", '[\n{"review": "a"}]', ["north.jsonl", "line 1", "jq -c '.[]'"]),
    "array-in-a-line": ("north.jsonl", '[{"review": "a"}]', ["north.jsonl", "line 1", "jq -c '.[]'"]),
    "array-file": ("north.json", '[{"review": "a"}]', ["unknown format '.json'", "jq -c '.[]'"]),
    "not-parquet": ("north.parquet", GOOD, ["north.parquet", "Parquet"]),
}
# name: (the third record of JSON lines, what the line must say beside file and row)
RECORDS: dict[str, tuple[str, list[str]]] = {
    "json-nan-text": ('{"review": NaN, "opinion": "good"}', ["'review'", "NaN"]),
    "json-null-text": ('{"review": null, "opinion": "good"}', ["'review'", "missing"]),
    "json-no-label": ('{"review": "fine"}', ["'opinion'"]),
    "json-number-as-text": ('{"review": 5, "opinion": "good"}', ["'review'", "int"]),
    "json-half-a-character": ('{"review": "\\ud83d", "opinion": "good"}', ["'review'", "surrogate"]),
    "json-fraction-as-label": ('{"review": "fine", "opinion": 0.5}', ["'opinion'", "0.5", "whole number"]),
    "json-truth-as-label": ('{"review": "fine", "opinion": true}', ["'opinion'", "True"]),
}
SINGLE |= {
    name: ("north.jsonl", with_record(2, line), ["north.jsonl", "row 3", *names])
    for name, (line, names) in RECORDS.items()
}


@pytest.mark.parametrize(("file", "content", "names"), SINGLE.values(), ids=SINGLE)
def test_a_bad_file_is_refused(
    refused: Refused, place: Path, file: str, content: str | bytes, names: list[str]
) -> None:
    (place / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    change_silo(place, path=file)
    refused(*RUN, names=names)


def test_a_column_in_another_case_is_suggested(refused: Refused, place: Path) -> None:
    change_silo(place, text="Review")
    refused(*RUN, names=["north.csv", "no column 'Review' (did you mean 'review'?)"])


def test_silos_as_a_mapping_are_told_the_keys_of_an_entry(refused: Refused, place: Path) -> None:
    (place / "mapping.yaml").write_text("silos: {north: north.csv}\n", encoding="utf-8")
    refused("data", "mapping.yaml", names=["silos: must be a list whose entries have the keys name, path"])


def test_a_missing_file_is_refused(refused: Refused, place: Path) -> None:
    (place / "north.csv").unlink()
    refused(*RUN, names=["north.csv", "not found"])


def test_parquet_without_the_column_or_with_a_null_is_refused(refused: Refused, place: Path) -> None:
    change_silo(place, path="north.parquet")
    texts, labels = zip(*reviews(), strict=True)
    table = pyarrow.table({"review": [*texts[:4], None, *texts[5:]], "opinion": list(labels)})
    pyarrow.parquet.write_table(table, place / "north.parquet")
    refused(*RUN, names=["north.parquet", "row 5", "'review'", "missing"])
    pyarrow.parquet.write_table(table.drop_columns("review"), place / "north.parquet")
    refused(*RUN, names=["north.parquet", "'review'", "opinion"])


def test_labels_that_do_not_fit_are_refused(refused: Refused, place: Path) -> None:
    change_silo(place, labels=["good", "worse"])
    refused(*RUN, names=["north.csv", "row 1", "'bad'", "good, worse"])


def test_silos_of_one_task_must_agree(refused: Refused, place: Path) -> None:
    change_silo(place, task="mood", labels=["bad", "good"])
    change_silo(place, 1, task="mood", labels=["good", "bad"], metric="f1")
    refused(*RUN, names=["'mood'", "labels", "('bad', 'good')", "('good', 'bad')"])
    change_silo(place, 1, labels=["bad", "good"])
    refused(*RUN, names=["'south'", "metric", "'mood'"])


HEADER = ["review", "opinion"]

# name: (file of the folder, its new rows; None: it is removed, what the line must say)
FOLDER: dict[str, tuple[str, list[str], list[tuple[str, object]] | None, list[str]]] = {
    "unknown-label-in-test": ("test", HEADER, [*reviews(4), ("odd", "medium")], ["row 5", "'medium'", "bad, good"]),
    "missing-column-in-test": ("test", ["text", "opinion"], reviews(4), ["test.csv", "'review'", "opinion, text"]),
    "empty-test": ("test", HEADER, [], ["test.csv", "no rows"]),
    "one-class-in-train": ("train", HEADER, reviews(20, ("bad",)), ["test.csv", "row 2", "'good'", "bad"]),
    "no-train": ("train", HEADER, None, ["north", "train.csv", "train.parquet"]),
}


@pytest.mark.parametrize(("split", "header", "rows", "names"), FOLDER.values(), ids=FOLDER)
def test_a_bad_folder_with_ready_splits_is_refused(
    refused: Refused,
    place: Path,
    split: str,
    header: list[str],
    rows: list[tuple[str, object]] | None,
    names: list[str],
) -> None:
    change_silo(place, path="north")
    (place / "north").mkdir()
    for name in ("train", "test"):
        if name != split or rows is not None:
            new = rows if name == split and rows is not None else reviews()
            write_csv(place / "north" / f"{name}.csv", header if name == split else HEADER, new)
    refused(*RUN, names=names)


def test_a_folder_with_two_files_of_a_split_is_refused(refused: Refused, place: Path) -> None:
    change_silo(place, path="north")
    (place / "north").mkdir()
    (place / "north" / "train.csv").write_text(GOOD, encoding="utf-8")
    (place / "north" / "train.jsonl").write_text("\n".join(LINES), encoding="utf-8")
    refused(*RUN, names=["north", "train.csv and train.jsonl", "one"])


class TestDataFolder:
    """`data.path`: a folder per task."""

    @pytest.fixture
    def data(self, place: Path, data_folder: Path, backbone_folder: Callable[[str], Path]) -> Path:
        path = place / "data"
        shutil.copytree(data_folder, path)
        keys = {"backbone": str(backbone_folder("bert")), "data": {"path": "data"}, "threads": 1, "rounds": 1}
        (place / "federation.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
        return path

    @pytest.mark.usefixtures("data")
    @pytest.mark.parametrize(
        ("words", "names"),
        [
            (["data.tasks=alpha,betta"], ["'betta'", "alpha, beta, gamma"]),
            (["data.path=nowhere"], ["data.path", "nowhere", "folder"]),
            (["data.path=north.csv"], ["data.path", "north.csv", "folder"]),
            (["data.task=all"], ["data.task", "'beta'", "other, same", "'alpha'", "bad, good", "data.labels"]),
            (["data.labels=[down,up]"], ["labels", "data.task"]),
            (
                ["data.tasks=alpha,gamma", "data.task=all", "data.labels=[down,up]"],
                ["data.labels", "2 names", "'gamma'", "yes, maybe, no"],
            ),
        ],
    )
    def test_tasks_and_labels_that_are_not_there(self, refused: Refused, words: list[str], names: list[str]) -> None:
        refused(*RUN, *words, names=names)

    def test_no_task_in_it(self, refused: Refused, data: Path) -> None:
        shutil.rmtree(data)
        data.mkdir()
        refused(*RUN, names=["data.path", "train.jsonl"])

    def test_an_odd_folder_name(self, refused: Refused, data: Path) -> None:
        (data / "alpha").rename(data / "al,pha")
        refused(*RUN, names=["data.path", "al,pha", "letters"])

    def test_no_train_file(self, refused: Refused, data: Path) -> None:
        (data / "alpha" / "train.jsonl").unlink()
        refused(*RUN, "data.tasks=alpha,beta", names=["alpha/train.jsonl", "not found"])

    def test_a_label_outside_the_names(self, refused: Refused, data: Path) -> None:
        for label in (2, -1):
            (data / "alpha" / "test.jsonl").write_text(json.dumps({"sentence1": "a", "label": label}), encoding="utf-8")
            refused(*RUN, names=["alpha/test.jsonl", "row 1", str(label), "bad, good"])

    @pytest.mark.parametrize("split", ["test", "train"])
    def test_a_pair_with_one_half_missing(self, refused: Refused, data: Path, split: str) -> None:
        path = data / "beta" / f"{split}.jsonl"
        path.write_text(json.dumps({"sentence1": "a", "label": 1}) + "\n" + path.read_text(), encoding="utf-8")
        refused(*RUN, names=[f"beta/{split}.jsonl", "'sentence2'"])

    @pytest.mark.parametrize(
        ("meta", "names"),
        {
            "missing": (None, ["meta.json", "not found"]),
            "not-json": ("{", ["meta.json", "JSON"]),
            "list": ("[]", ["meta.json", "label_names"]),
            "no-names": ("{}", ["meta.json", "label_names"]),
            "one-name": ('{"label_names": ["good"]}', ["meta.json", "label_names", "2"]),
            "name-twice": ('{"label_names": ["good", "good"]}', ["meta.json", "label_names", "different"]),
            "metric": ('{"label_names": ["bad", "good"], "metric": "rouge"}', ["meta.json", "'rouge'", "accuracy, f1"]),
        }.values(),
    )
    def test_bad_meta(self, refused: Refused, data: Path, meta: str | None, names: list[str]) -> None:
        path = data / "alpha" / "meta.json"
        path.unlink() if meta is None else path.write_text(meta, encoding="utf-8")
        refused(*RUN, names=["alpha", *names])


@pytest.mark.parametrize(
    ("words", "names"),
    [(("mixed6",), ["data.path", "mixed6"]), (("fedmcp-glue",), ["nyu-mll/glue/mrpc", "data.path=FOLDER"])],
)
def test_a_preset_without_its_data_is_refused(refused: Refused, words: tuple[str, ...], names: list[str]) -> None:
    refused("run", *words, names=names)
