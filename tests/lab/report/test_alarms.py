"""What a report warns of: constant answers, scores that disagree, edges of a grid, unequal budgets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sklearn import metrics

from silotune.data.rows import Row
from silotune.data.tasks import make_task
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.baselines import MAJORITY, baseline_scores
from silotune.evaluation.predict import Measured
from silotune.evaluation.score_details import Bootstrap, score_details
from silotune.lab.comparison import sweep_remarks
from silotune.lab.report.alarms import alarms
from silotune.lab.report.entries import read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.judging_plan import JudgingPlan
from silotune.lab.report.table_files import write_tables
from tests.support.report_runs import write_run


def of_runs(tmp_path: Path, **more: object) -> Results:
    write_run(tmp_path / "one", "fedavg", 1, {"a": 60.0}, **more)  # type: ignore[arg-type]
    return Results(read_entries([tmp_path / "one"]), plan=JudgingPlan(remarks=("said of a sweep",)))


def test_a_quiet_run_has_no_alarm_but_what_its_sweep_says(tmp_path):
    results = of_runs(tmp_path)
    assert alarms(results) == ["said of a sweep"]
    write_tables(results, tmp_path)
    assert "**Alarm.** said of a sweep" in (tmp_path / "table.md").read_text()


def test_validation_and_test_that_disagree_by_more_than_chance_are_named(tmp_path):
    """56.7 % of 20 and 60 % of 20 rows are chance; the former of 2,000 and 15 % of 2,000 are not."""
    results = of_runs(tmp_path)
    summary = results.runs[0].summary["silos"]["a"]
    summary["rows"] = {"train": 80, "validation": 2000, "test": 2000}
    summary["test"] = 15.0
    assert "fedavg: validation and test differ by more than chance: a (56.7 and 15.0)" in alarms(results)
    summary["rows"] = {"train": 80, "validation": 4, "test": 4}
    assert alarms(results) == ["said of a sweep"]


def test_one_answer_to_all_rows_is_named(tmp_path):
    results = of_runs(tmp_path)
    task = make_task("t", "t", "classification", ["no", "yes"], "accuracy")
    rows = TokenizedRows(task, [[1]] * 40, None, torch.arange(40) % 2)
    details = score_details(Measured(50.0, logits=torch.tensor([[1.0, 0.0]]).expand(40, 2)), rows, Bootstrap(0, 1))
    (tmp_path / "one" / "scores.json").write_text(json.dumps({"silos": {"a": details}, "global": None}))
    assert "fedavg: one answer to nearly all rows: a ('no' to 100 % of rows, balanced accuracy 50.0)" in alarms(results)


def test_unequal_rounds_are_named(tmp_path):
    write_run(tmp_path / "two", "local", 1, {"a": 60.0}, rounds=5)
    write_run(tmp_path / "one", "fedavg", 1, {"a": 60.0})
    lines = alarms(Results(read_entries([tmp_path / "one", tmp_path / "two"])))
    assert lines == ["Unequal numbers of rounds: fedavg 3; local 5"]


def test_answers_that_are_options_have_their_share_balanced_accuracy_and_a_most_frequent_one():
    task = make_task("t", "t", "generation", [], "rouge1")
    said, wanted = ["yes", "yes", "no ", "yes", "yes"], ["yes", "no", "no", "maybe", "yes"]
    rows = TokenizedRows(task, [[1]] * 5, None, torch.zeros(5), answers=wanted, options=True)
    details = score_details(Measured(60.0, written=said), rows, Bootstrap(0, 1))
    assert details is not None
    assert details["commonest"] == ["yes", 80.0]
    expected = metrics.balanced_accuracy_score(wanted, [text.strip() for text in said])
    assert details["metrics"]["balanced_accuracy"] == pytest.approx(100 * expected)
    listed = [Row(("Is it?\n- yes\n- no\n- maybe",), 0, answer) for answer in wanted]
    assert baseline_scores(task, listed, listed) == {MAJORITY: pytest.approx(40.0)}
    assert baseline_scores(task, [Row(("Is it?",), 0, answer) for answer in wanted], listed) == {}


def test_a_sweep_names_edges_and_unequal_trials(tmp_path):
    (tmp_path / "sweep.csv").write_text(
        "method,trial,train.lr,tuner.name,validation,std,n,best,folder\n"
        "a,1,0.001,lora,50,,1,,x\na,2,0.01,lora,60,,1,yes,x\na,3,0.003,lora,50,,1,,x\n"
        "b,1,0.001,lora,50,,1,,x\nb,2,0.003,ia3,70,,1,yes,x\nb,3,0.01,lora,50,,1,,x\nb,4,0.1,lora,,,1,,x\n"
        "c,1,0.001,lora,50,,1,yes,x\n"
    )
    assert list(sweep_remarks(tmp_path, ["a", "b"])) == [
        "a: train.lr=0.01 is the largest value searched; a better one may lie beyond",
        "Unequal numbers of trials: a 3, b 4",
    ]
    assert list(sweep_remarks(tmp_path, ["c"])) == []
    assert list(sweep_remarks(tmp_path / "none", ["c"])) == []
