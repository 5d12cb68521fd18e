"""Silos whose rows have numbers (regression) or several labels: from files to scores, predictions and an export."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml
from scipy import stats
from sklearn.metrics import f1_score

from silotune import load_run, run
from silotune.interop.export import export
from tests.support.command_line import Refused, Silotune, reviews, write_csv, write_federation
from tests.support.method_cases import logged
from tests.support.small_runs import carried_along


def number_rows(count: int = 100) -> list[tuple[str, float]]:
    """Sentences of a kind or an awful garden or river, and a number: 3 if it is kind, and 1 more for a garden."""
    return [(text, 3.0 * (label == "good") + ("garden" in text)) for text, label in reviews(count)]


def label_rows(count: int = 100) -> list[tuple[str, str]]:
    """The same sentences; their labels are warm, garden, both or none."""
    names = {0.0: "", 1.0: "garden", 3.0: "warm", 4.0: "garden; warm"}
    return [(text, names[number]) for text, number in number_rows(count)]


def write_setting(folder: Path, backbone: Path, kind: str, **entry: object) -> Path:
    rows = number_rows() if kind == "regression" else label_rows()
    more: dict[str, object] = {} if kind == "regression" else {"label_separator": ";"}
    silos = [
        {"name": name, "path": f"{name}.csv", "text": "review", "label": "known", "task": "mood", "kind": kind}
        | more
        | entry
        for name in ("north", "south")
    ]
    path = write_federation(folder, backbone, silos=silos, rounds=2)
    for name, part in (("north", rows[:50]), ("south", rows[50:])):  # over those of other columns
        write_csv(folder / f"{name}.csv", ["review", "known"], part)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, backbone_folder: Callable[[str], Path]) -> Callable[[str], Path]:
    """`finished("regression")` → a folder with a finished run in `out`."""

    @cache
    def folder(kind: str) -> Path:
        made = tmp_path_factory.mktemp(kind)
        setting = write_setting(made, backbone_folder("bert"), kind)
        run(str(setting), "train.lr=0.01", "train.epochs=2", out=made / "out")
        return made

    return folder


@pytest.fixture
def folder(kind: str, finished: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a kind's finished run, which is the working folder."""
    monkeypatch.chdir(finished(kind))
    return finished(kind)


both_kinds = pytest.mark.parametrize("kind", ["regression", "multilabel"])


def details(folder: Path, silo: str = "north") -> dict[str, Any]:
    return json.loads((folder / "out" / "scores.json").read_text(encoding="utf-8"))["silos"][silo]


def predictions(folder: Path, silo: str = "north") -> list[dict[str, Any]]:
    rows = pyarrow.parquet.read_table(folder / "out" / "predictions.parquet").to_pylist()
    return [row for row in rows if row["silo"] == silo]


def losses(folder: Path) -> list[float]:
    """The first silo's mean training loss in each round."""
    return [event["loss"] for event in logged(folder / "out", "silo") if event["silo"] == "north"]


@pytest.mark.parametrize("kind", ["regression"])
def test_a_run_learns_numbers_and_its_scores_are_scipys(folder: Path) -> None:
    summary = json.loads((folder / "out" / "summary.json").read_text(encoding="utf-8"))
    task = {"name": "mood", "labels": [], "metric": "pearson_spearman", "kind": "regression", "texts": 1}
    assert summary["tasks"]["north"] == task
    first, last = losses(folder)
    assert last < 0.95 * first
    for silo in ("north", "south"):
        rows, scores = predictions(folder, silo), details(folder, silo)
        said, known = ([float(row[key]) for row in rows] for key in ("predicted", "label"))
        assert scores["metrics"]["pearson"] == pytest.approx(100 * stats.pearsonr(said, known).statistic, abs=1e-3)
        assert scores["metrics"]["spearman"] == pytest.approx(100 * stats.spearmanr(said, known).statistic, abs=1e-3)
        assert scores["score"] == summary["silos"][silo]["test"]
        assert {row["probabilities"] for row in rows} == {None}
        baseline = summary["baselines"]["silos"][silo]
        assert baseline["mean"] == 0.0  # a constant answer has no correlation
        assert "bag_of_words" in baseline
        low, high = summary["intervals"]["silos"][silo]
        assert low <= scores["score"] <= high


@pytest.mark.parametrize("kind", ["multilabel"])
def test_a_run_learns_sets_of_labels(folder: Path) -> None:
    summary = json.loads((folder / "out" / "summary.json").read_text(encoding="utf-8"))
    rows, scores = predictions(folder), details(folder)
    marks = [
        [[name in json.loads(row[key]) for name in ("garden", "warm")] for row in rows]
        for key in ("label", "predicted")
    ]
    assert scores["score"] == pytest.approx(100 * f1_score(*marks, average="micro"))
    first, last = losses(folder)
    assert last < first < 0.8
    assert scores["per_class"]["warm"]["rows"] == sum(mark[1] for mark in marks[0])
    assert summary["baselines"]["silos"]["north"].keys() == {"majority", "bag_of_words"}
    assert all(0 <= share <= 1 for row in rows for share in row["probabilities"])


@both_kinds
@pytest.mark.usefixtures("folder")
def test_every_way_to_a_prediction_says_the_same(kind: str, silotune: Silotune, tmp_path: Path) -> None:
    texts = [text for text, _ in number_rows()[:6]]
    answers = load_run("out").model("north").predict(texts)
    lines = [json.loads(silotune("predict", "out", "--silo", "north", "--text", text).out) for text in texts[:1]]
    export(load_run("out", precision="fp32", device="cpu").model("north"), "mixed", tmp_path / "export", None)
    alone = carried_along(tmp_path / "export").load(tmp_path / "export").predict(texts)
    if kind == "regression":
        assert lines[0]["value"] == pytest.approx(answers[0].value, abs=1e-5)
        assert [of["value"] for of in alone] == pytest.approx([of.value for of in answers], abs=1e-4)
        assert {answer.label for answer in answers} == {""}
    else:
        assert lines[0]["labels"] == list(answers[0].labels)
        assert [tuple(of["labels"]) for of in alone] == [of.labels for of in answers]
        assert alone[0]["probabilities"] == pytest.approx(answers[0].probabilities, abs=1e-4)
    card = (tmp_path / "export" / "README.md").read_text(encoding="utf-8")
    assert f"| Task | mood ({kind}" in card


@both_kinds
def test_evaluate_and_data_know_such_rows(kind: str, folder: Path, silotune: Silotune) -> None:
    scores = json.loads(silotune("evaluate", "out", "--silo", "north", "--file", "north.csv", "--json").out)
    assert scores["rows"] == 50
    assert scores["metric"] == details(folder)["metric"]
    assert set(scores["metrics"]) - {"loss"} == set(details(folder)["metrics"]) - {"loss"}
    shown = silotune("data", "federation.yaml", "--show", "1").out
    if kind == "regression":
        assert re.search(r"→ [0-4]\n", shown)
        assert "numbers of north's training rows: 0 to 4, mean" in shown
    else:
        assert re.search(r"→ (garden|warm|garden, warm|no label)\n", shown)
        assert "labels of north's training rows: " in shown


@pytest.mark.long
@both_kinds
def test_a_report_names_their_metrics(kind: str, folder: Path, silotune: Silotune) -> None:
    assert silotune("report", "out", "--out", "page.html").code == 0
    page = (folder / "page.html").read_text(encoding="utf-8")
    shown = ("mean of Pearson and Spearman", "mean number") if kind == "regression" else ("micro F1", "F1 per label")
    assert all(words in page for words in shown)


def test_what_needs_one_label_a_row_is_refused(
    refused: Refused, place: Path, backbone_folder: Callable[[str], Path]
) -> None:
    write_setting(place, backbone_folder("bert"), "regression")
    words = ("run", "federation.yaml", "--dry-run")
    refused(*words, "head=verbalizer", names=["head=verbalizer", "texts with numbers", "allowed: linear, mlp"])
    refused(*words, "train.label_smoothing=0.1", names=["train.label_smoothing", "texts with numbers", "leave it out"])
    refused(*words, "train.class_weights=balanced", names=["train.class_weights", "texts with numbers"])
    refused(*words, "attack=backdoor", "attack.target=x", names=["attack=backdoor", "texts with numbers"])
    refused(*words, "silos.north.metric=accuracy", names=["metric of silo 'north'", "pearson"])
    refused(*words, "silos.north.positive=x", names=["positive is a label of kind: classification"])
    refused(*words, "silos.north.label_separator=;", names=["label_separator belongs to kind: multilabel"])
    refused(*words, "silos.north.kind=classification", names=["metric, positive or kind differs", "mood"])
    refused(*words, "method=server-only", "server.labels_per_class=2", names=["texts with numbers"])
    keys = yaml.safe_load((place / "federation.yaml").read_text(encoding="utf-8"))
    keys["silos"] = keys["silos"][:1]
    (place / "one.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    refused(
        "run", "one.yaml", "partition=dirichlet", "partition.silos=2", names=["texts with numbers", "iid, quantity"]
    )
    rows = [("a warm day", "3"), ("a cold day", "three")]
    write_csv(place / "north.csv", ["review", "known"], rows)
    refused(*words, names=["north.csv: row 2: 'known' is no number: 'three'", "kind=regression"])
    write_csv(place / "north.csv", ["review", "known"], [(text, 2.5) for text, _ in number_rows()])
    refused(*words, names=["silo 'north'", "only one number in its training rows ('2.5')"])
