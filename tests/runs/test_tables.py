"""Silos that are tables of Python: data frames, data sets, dictionaries; and a `Config` made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from silotune import Config, InputError, evaluate, load_run, read_config, run
from silotune.config import Choice, SiloConfig, TrainConfig, tables
from silotune.data.loading import load_silos
from tests.support.command_line import reviews, write_csv

ROWS = [{"text": text, "label": label} for text, label in reviews()]
CLASSES = Features({"text": Value("string"), "label": ClassLabel(names=["bad", "good"])})

TABLES: dict[str, Any] = {
    "pandas": pandas.DataFrame(ROWS),
    "categories": pandas.DataFrame(ROWS).astype({"label": "category"}),
    "datasets": Dataset.from_list(ROWS),
    "classes": Dataset.from_list(ROWS).cast(CLASSES),
    "pyarrow": pyarrow.Table.from_pylist(ROWS),
    "dictionaries": ROWS,
}


@pytest.mark.parametrize("kind", TABLES)
def test_every_kind_of_table_gives_the_rows_of_the_file(kind: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "rows.csv", ["text", "label"], reviews())
    (of_file,) = load_silos(read_config("", silos=[{"name": "a", "path": path}]))
    (of_table,) = load_silos(read_config("", silos={"a": TABLES[kind]}))
    assert of_table == of_file


def test_splits_and_columns() -> None:
    halves = DatasetDict(train=Dataset.from_list(ROWS[:12]), test=Dataset.from_list(ROWS[12:]))
    (silo,) = load_silos(read_config("", silos={"a": halves}))
    assert (len(silo.splits.train) + len(silo.splits.validation), len(silo.splits.test)) == (12, 8)
    renamed = pandas.DataFrame(ROWS).rename(columns={"text": "review", "label": "spam"})
    renamed["spam"] = renamed["spam"] == "bad"
    entry: Any = {"name": "a", "rows": renamed, "text": "review", "label": "spam", "metric": "f1", "positive": "true"}
    (silo,) = load_silos(read_config("", silos=[entry]))
    assert silo.task.labels == ("false", "true")
    assert silo.task.positive == "true"


def test_a_run_over_tables(backbone_folder, tmp_path: Path) -> None:
    keys: Any = {"train": {"batch_size": 8, "max_length": 32}, "tuner": {"name": "bottleneck", "r": 2}, "threads": 1}
    silos = {"a": pandas.DataFrame(ROWS), "b": Dataset.from_list(ROWS)}
    folder = str(backbone_folder("bert"))
    finished = run("", method="fedavg", rounds=1, backbone=folder, silos=silos, out=tmp_path / "run", **keys)
    assert set(finished.silos) == {"a", "b"}
    again = run("", method="fedavg", rounds=1, backbone=folder, silos=silos, out=tmp_path / "run", resume=True, **keys)
    assert again.summary == finished.summary
    scored = evaluate(finished, "a", TABLES["pandas"], resamples=0)
    assert scored["rows"] == 20
    assert scored.title == "20 rows of a table, silo a"
    assert evaluate(tmp_path / "run", "a", Dataset.from_list(ROWS), resamples=0)["metrics"] == scored["metrics"]
    assert "accuracy" in repr(scored)
    assert "<td>accuracy</td>" in scored._repr_html_()
    assert list(scored.to_pandas().loc["accuracy"])[:1] == [scored.score]
    for texts, message in (("hello", "a list of texts"), ([("one", "two")], "takes single texts")):
        with pytest.raises(InputError, match=message):
            finished.model("a").predict(texts)
    tables._kept.clear()  # as in another process
    assert load_run(tmp_path / "run").summary == finished.summary
    with pytest.raises(InputError, match="memory of another process"):
        load_silos(read_config(str(tmp_path / "run" / "config.yaml")))


@pytest.mark.parametrize(
    ("silos", "message"),
    [
        ({"a": 3}, "silos.a: must be a table"),
        ({"a": []}, "silos.a: no rows"),
        ({"a": {"test": ROWS}}, "silos.a: must be a table, or tables by split"),
        ([{"name": "a", "rows": ROWS, "path": "x.csv"}], "'rows' and 'path' exclude each other"),
        ({"a": pandas.DataFrame({"text": [1, "a"], "label": [0, 1]})}, "silos.a: cannot be read"),
    ],
)
def test_what_is_no_table_is_refused(silos: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_config("", silos=silos)


def test_a_config_made_by_hand_has_the_defaults_of_its_method(tmp_path: Path) -> None:

    by_hand = Config(
        method=Choice(name="fedprompt"), train=TrainConfig(lr=0.1), silos=[SiloConfig(name="a", path=str(tmp_path))]
    )
    words = read_config("", ["method=fedprompt", "train.lr=0.1", f"silos=[{{name: a, path: {tmp_path}}}]"])
    assert read_config(by_hand) == words
    assert words.tuner.name == "prompt"
    assert read_config(words) == words
    for preset in ("demo", "fedfame-mrpc", "mixed6", "feddpa-dataset1"):
        config = read_config(preset, data={"path": tmp_path} if preset != "demo" else {})
        assert read_config(config) == config


def test_a_table_without_its_columns_is_named_by_its_silo() -> None:
    frame = pandas.DataFrame(ROWS)
    with pytest.raises(InputError, match=r"^silo 'b': the table: no column 'text'; columns: label"):
        load_silos(read_config("", silos={"a": frame, "b": frame.drop(columns="text")}))
    other = frame.rename(columns={"text": "review", "label": "spam"})
    with pytest.raises(
        InputError, match=r"^silo 'a': .*: no column 'text' and no column 'label'; columns: review, spam"
    ):
        load_silos(read_config("", silos={"a": other}))
    with pytest.raises(InputError, match=r"^silo 'a': .*: row 3: 'text' is not text but int"):
        load_silos(read_config("", silos={"a": [*ROWS[:2], {"text": 5, "label": "bad"}, *ROWS[3:]]}))
