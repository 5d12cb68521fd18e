"""Own files as they come: truth values, encodings, compressed, with cells of any size; entries changed by words."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from silotune.config import dump
from silotune.data.loading import load_silos
from silotune.data.readers import read_records
from silotune.data.targets import target_rows
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.runs.build.resolve import read_config
from tests.support.command_line import change_silo, reviews, write_csv


def north(place: Path, *words: str, **changes: object):
    """The first silo of `federation.yaml`, with changes to its entry."""
    return load_silos(read_config(str(change_silo(place, **changes)), list(words)))[0]


def test_truth_values_are_labels(place: Path) -> None:
    rows = [{"review": text, "opinion": label == "good"} for text, label in reviews()]
    (place / "north.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / "north.parquet")
    for name in ("north.jsonl", "north.parquet"):
        silo = north(place, path=name, positive="true", metric="f1")
        assert (silo.task.labels, silo.task.positive) == (("false", "true"), "true")
        texts = dict(reviews())
        for row in silo.splits.train:
            assert silo.task.labels[row.label] == str(texts[row.texts[0]] == "good").lower()


def test_truth_values_of_two_formats_are_one() -> None:
    """pandas writes `True` into a CSV file; JSON lines and Parquet give `true`."""
    for names in (("False", "True"), ("false", "true")):
        for labels in (("False", "True", "True"), ("false", "true", "TRUE")):
            records = [{"text": "kind", "label": label} for label in labels]
            rows = target_rows(Path("new.csv"), records, ("text",), "label", Task("t", names), by_index=False)
            assert [row.label for row in rows] == [0, 1, 1]
    records = [{"text": "kind", "label": "True"}]
    with pytest.raises(InputError, match="unknown label 'True'; allowed: maybe, true"):
        target_rows(Path("new.csv"), records, ("text",), "label", Task("t", ("maybe", "true")), by_index=False)


def test_other_encodings_are_named(place: Path) -> None:
    plain = (place / "north.csv").read_text(encoding="utf-8").replace("garden", "Gärtchen")
    (place / "north.csv").write_bytes(plain.encode("cp1252"))
    with pytest.raises(InputError, match=r"not UTF-8 \(byte \d+\); `encoding` names another"):
        north(place)
    silo = north(place, encoding="cp1252")
    assert any("Gärtchen" in row.texts[0] for row in silo.splits.train)
    assert "encoding: cp1252" in dump(read_config(str(place / "federation.yaml")))
    with pytest.raises(InputError, match="'rot13' is no encoding of text"):
        north(place, encoding="rot13")
    (place / "north.csv").write_bytes("\ufeff".encode() + plain.encode())
    assert north(place, encoding="UTF8").splits.train
    (place / "north.csv").write_bytes(plain.encode("utf-16"))
    assert north(place).splits == silo.splits


def test_another_separator_is_named(place: Path) -> None:
    """As a spreadsheet in German or French writes a CSV file; a run's model reads the silo's later files so, too."""
    expected = north(place).splits
    write_csv(place / "north.csv", ["review", "opinion"], reviews(), delimiter=";")
    assert north(place, column_separator=";").splits == expected


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_have_the_same_rows(place: Path, ending: str) -> None:
    content = (place / "north.csv").read_bytes()
    expected = north(place).splits
    packed = place / f"north.csv{ending}"
    if ending == ".gz":
        packed.write_bytes(gzip.compress(content[:100]) + gzip.compress(content[100:]))  # gzip allows several in one
    else:
        with pyarrow.CompressedOutputStream(str(packed), "zstd") as stream:
            stream.write(content)
    assert north(place, path=packed.name).splits == expected
    (place / "folder").mkdir()
    for split in ("train", "test"):
        (place / "folder" / f"{split}.csv{ending}").write_bytes(packed.read_bytes())
    assert len(north(place, path="folder").splits.test) == 20
    packed.write_bytes(packed.read_bytes()[:40])
    with pytest.raises(InputError, match=rf"north\.csv\{ending}: not readable as"):
        north(place, path=packed.name)


def test_parquet_is_not_compressed_again(place: Path) -> None:
    (place / "north.parquet.gz").write_bytes(b"x")
    with pytest.raises(InputError, match=r"unknown format.*allowed: .csv.*\.gz or \.zst"):
        north(place, path="north.parquet.gz")


def test_a_cell_may_be_of_any_size(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    (tmp_path / "huge.csv").write_text(f"text,label\n{'long ' * 40_000},good\n", encoding="utf-8")
    assert len(read_records(tmp_path / "huge.csv")[0]["text"]) == 200_000
    assert csv.field_size_limit() == limit


# -- entries of `silos` on the command line ----------------------------------------------------------------------------


def test_an_entry_is_changed_by_its_name(place: Path, tmp_path: Path) -> None:
    config = read_config(
        str(place / "federation.yaml"), ["silos.north.metric=f1", "silos.north.positive=good", "silos.south.task=x"]
    )
    first, second = config.silos
    assert (first.metric, first.positive, first.columns) == ("f1", "good", ("review",))
    assert (second.task, second.metric) == ("x", None)
    moved = read_config(str(place / "federation.yaml"), ["silos.north.path=other.csv"]).silos[0]
    assert moved.path == str(Path("other.csv").resolve())


def test_names_with_dots_are_found(place: Path) -> None:
    change_silo(place, 0, name="v1.0")
    path = change_silo(place, 1, name="v1")
    config = read_config(str(path), ["silos.v1.0.metric=mcc", "silos.v1.metric=f1"])
    assert [silo.metric for silo in config.silos] == ["mcc", "f1"]


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("silos.nrth.metric=f1", ["'nrth'", "did you mean 'north'"]),
        ("silos.north.metrik=f1", ["silos.north.metrik"]),
        ("silos.north.metric=f2", ["silos.north.metric", "f1"]),
        ("silos.north=f1", ["'north'"]),
    ],
)
def test_what_is_no_entry_is_refused(place: Path, word: str, names: list[str]) -> None:
    with pytest.raises(InputError) as error:
        read_config(str(place / "federation.yaml"), [word])
    for name in names:
        assert name in str(error.value)
    with pytest.raises(InputError, match="no list of silos"):
        read_config("demo", [word])
