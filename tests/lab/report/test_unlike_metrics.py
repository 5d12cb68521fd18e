"""Silos with unlike metrics: no common average, tests apart; baselines and intervals in the tables."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from silotune.cli.result_table import result_table
from silotune.lab.report.entries import ReportEntry, read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.html_page import list_caveats, render_page
from silotune.lab.report.judging import verdicts
from silotune.lab.report.significance import beaten_by_words
from silotune.lab.report.table_files import comparison_frame, write_tables
from silotune.lab.report.tables import score_table
from silotune.runs.scores import average_text
from tests.support.report_runs import write_run

METRICS = {"a": "accuracy", "b": "f1", "c": "accuracy"}


def mixed(folder: Path, method: str, seed: int, tests: dict[str, float]) -> Path:
    """A run whose silos a and c are judged by accuracy, b by F1 of `yes`; with baselines and intervals."""
    write_run(folder, method, seed, tests)
    summary = json.loads((folder / "summary.json").read_text())
    for name, silo in summary["silos"].items():
        silo["metric"] = METRICS[name]
    summary["average"] = None
    summary["tasks"]["b"]["positive"] = "yes"
    summary["baselines"] = {
        "silos": {name: {"majority": 40.0 + seed, "bag_of_words": 55.0} for name in tests},
        "global": None,
    }
    summary["intervals"] = {"silos": {name: [value - 9, value + 9] for name, value in tests.items()}, "global": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def entries(tmp_path: Path) -> list[ReportEntry]:
    for seed in (1, 2):
        mixed(tmp_path / f"fedavg-{seed}", "fedavg", seed, {"a": 60.0, "b": 90.0, "c": 70.0})
        mixed(tmp_path / f"moon-{seed}", "moon", seed, {"a": 62.0 + seed, "b": 80.0, "c": 74.0})
    return read_entries([tmp_path])


def test_each_metric_has_its_average(entries: list[ReportEntry]) -> None:
    table = score_table(Results(entries))
    assert table.header == ["a", "b", "c", "average accuracy", "average f1"]
    assert "accuracy: a, c; F1 of yes: b" in table.title
    shown = {label: [cell.text for cell in cells] for label, cells in table.rows}
    assert shown["fedavg"][3:] == ["65.00 ± 0.00", "90.00 ± 0.00"]
    assert shown["moon"][3:] == ["68.75 ± 0.35", "80.00 ± 0.00"]
    assert shown["most frequent label"] == ["41.50 ± 0.71"] * 5
    assert shown["bag of words"] == ["55.00 ± 0.00"] * 5
    assert average_text(entries[0].first.summary) == "accuracy 65.00, F1 90.00"


def test_verdicts_are_of_one_metric(entries: list[ReportEntry]) -> None:
    judged = [(each.entry, each.reference, each.column) for each in verdicts(Results(entries))]
    assert judged == [("moon", "fedavg", "average accuracy"), ("moon", "fedavg", "average f1")]


def test_the_files_and_the_page_have_them(entries: list[ReportEntry], tmp_path: Path) -> None:
    rows = comparison_frame(Results(entries)).to_dict("records")
    found = {(row["method"], row["silo"]): (row["metric"], row["mean"]) for row in rows}
    assert found["moon", "average f1"] == ("f1", "80")
    assert ("moon", "average") not in found
    write_tables(Results(entries), tmp_path)
    with (tmp_path / "baselines.csv").open(encoding="utf-8", newline="") as file:
        beside = {(row["baseline"], row["silo"]): (row["metric"], row["mean"]) for row in csv.DictReader(file)}
    assert beside["bag of words", "average accuracy"] == ("accuracy", "55")
    assert beside["most frequent label", "b"] == ("f1", "41.5")
    assert "bag of words" in (tmp_path / "table.tex").read_text()
    assert "Baselines learn" in (tmp_path / "table.md").read_text()
    page = render_page(Results(entries), [])
    assert "average f1" in page
    assert "bag of words" in page


def printed(table: object, width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_the_table_of_a_run_names_metrics_and_intervals(entries: list[ReportEntry]) -> None:
    one = printed(result_table([entries[0].first.summary]))
    for word in ("F1 of yes", "accuracy", "95 % interval", "51.0 to 69.0", "bag of words", "55.0", "41.0"):
        assert word in one
    several = printed(result_table([entry.first.summary for entry in entries]))
    assert "95 % interval" not in several
    assert several.count("average") == 2
    assert "68.5" in several  # moon's mean accuracy with seed 1


def test_one_metric_stands_in_the_title_and_names_stay_whole(tmp_path: Path) -> None:
    name = "duplicate_question"
    runs = [write_run(tmp_path / method, method, 1, {name: 60.0, "b": 61.0}) for method in ("local", "fedavg", "moon")]
    table = result_table([json.loads((run / "summary.json").read_text()) for run in runs])
    assert str(table.title).startswith("test accuracy (%) at")
    assert [column.header for column in table.columns] == ["silo", "local", "fedavg", "moon"]
    text = printed(table, width=40)
    assert name in text
    assert "trained parameters" in text


def test_where_words_are_enough_is_said(entries: list[ReportEntry], tmp_path: Path) -> None:
    assert beaten_by_words(Results(entries)) == []
    for seed in (1, 2):
        path = mixed(tmp_path / f"local-{seed}", "local", seed, {"a": 50.0, "b": 54.0, "c": 55.0}) / "summary.json"
        summary = json.loads(path.read_text())
        summary["baselines"]["silos"]["c"]["bag_of_words"] = 54.0
        path.write_text(json.dumps(summary))
    assert beaten_by_words(Results(read_entries([tmp_path]))) == [], "other methods are better"
    (text,) = beaten_by_words(Results(alone := read_entries([tmp_path / f"local-{seed}" for seed in (1, 2)])))
    assert text == (
        "A bag of words is better than all methods on a (55.00, best method 50.00), b (55.00, best method 54.00), "
        "average accuracy (54.50, best method 52.50), average f1 (55.00, best method 54.00)"
    )
    assert text in list_caveats(Results(alone))


def test_of_a_loss_the_least_is_best(tmp_path: Path) -> None:
    for name, of_words in {"worse": 9.0, "better": 7.0}.items():
        path = write_run(tmp_path / name, "local", 1, {"a": 8.0}, metric="mse") / "summary.json"
        summary = json.loads(path.read_text())
        summary["baselines"] = {"silos": {"a": {"mean": 20.0, "bag_of_words": of_words}}, "global": None}
        path.write_text(json.dumps(summary))
    assert beaten_by_words(Results(read_entries([tmp_path / "worse"]))) == []
    (text,) = beaten_by_words(Results(read_entries([tmp_path / "better"])))
    assert text.endswith("on a (7.00, best method 8.00), average (7.00, best method 8.00)")
