"""`silotune evaluate RUN --silo NAME --file FILE`: a finished model on new labeled rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest

from silotune import run
from tests.support.command_line import Silotune, reviews, write_csv, write_federation


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, backbone_folder: Callable[[str], Path]) -> Path:
    """A folder with a finished run in `out`; tests add files beside it."""
    folder = tmp_path_factory.mktemp("finished")
    run(str(write_federation(folder, backbone_folder("bert"))), "train.lr=0.01", "train.epochs=4", out=folder / "out")
    return folder


@pytest.fixture
def place(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the finished run, which is the working folder."""
    monkeypatch.chdir(finished)
    return finished


def test_a_labeled_file_is_scored_as_predictions_say(silotune: Silotune, place: Path) -> None:
    rows = reviews(40)[20:]
    write_csv(place / "new.csv", ["review", "opinion"], rows)
    words = ("evaluate", "out", "--silo", "north", "--file", "new.csv")
    outcome = silotune(*words, "--json", "--predictions", "new.parquet")
    assert (outcome.code, outcome.err) == (0, "")
    scores = json.loads(outcome.out)
    (place / "texts.txt").write_text("\n".join(text for text, _ in rows) + "\n", encoding="utf-8")
    answers = silotune("predict", "out", "--silo", "north", "--file", "texts.txt").out.splitlines()
    said = [json.loads(answer)["label"] for answer in answers]
    right = [label == str(own) for label, (_, own) in zip(said, rows, strict=True)]
    assert scores["metrics"]["accuracy"] == scores["score"] == pytest.approx(100 * sum(right) / 20)
    assert scores["rows"] == 20
    assert sum(map(sum, scores["confusion"])) == 20
    low, high = scores["intervals"]["accuracy"]
    assert low <= scores["score"] <= high
    assert [row["predicted"] for row in pyarrow.parquet.read_table(place / "new.parquet").to_pylist()] == said
    shown = silotune(*words).out
    for word in ("accuracy", "macro F1", "MCC", "AUROC", "ECE", "per class", "good", "95 % interval"):
        assert word in shown


def test_the_runs_own_test_rows_give_the_runs_own_score(silotune: Silotune, place: Path) -> None:
    """Columns may be named; a pair has two."""
    with (place / "south.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    renamed = ["a", "b", "c"]
    write_csv(place / "renamed.csv", renamed, rows)
    words = ("evaluate", "out", "--silo", "south", "--json", "--file")
    one = json.loads(silotune(*words, "south.csv").out)
    other = json.loads(silotune(*words, "renamed.csv", "--text", "a, b", "--label", "c").out)
    assert one["metrics"] == other["metrics"]
    assert header != renamed


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ((), ["--file", "--lm-eval"]),
        (("--file", "north.csv", "--lm-eval", "arc"), ["--file", "--lm-eval"]),
        (("--file", "north.csv", "--limit", "3"), ["--limit", "--lm-eval"]),
        (("--lm-eval", "arc", "--label", "x"), ["--label", "--file"]),
        (("--file", "none.csv"), ["none.csv", "not found"]),
        (("--file", "south.csv"), ["no column 'review'", "first"]),
        (("--file", "south.csv", "--text", "first,second", "--label", "relation"), ["--text", "2 columns", "1 text"]),
        (("--file", "south.csv", "--text", "first", "--label", "relation"), ["unknown label", "bad, good"]),
        (("--file", "north.csv", "--predictions", "no/where.parquet"), ["--predictions", "folder"]),
    ],
)
def test_what_does_not_fit_is_one_line(
    silotune: Silotune, place: Path, words: tuple[str, ...], names: list[str]
) -> None:
    outcome = silotune("evaluate", "out", "--silo", "north", *words)
    outcome.refusal(*names)
