"""Rows on several data sets in one report: scores are set against one another on the same test rows alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from silotune.lab.personalization import measure_tables
from silotune.lab.report.entries import read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.judging import verdicts
from silotune.lab.report.tables import score_table
from silotune.runs.scores import ranks
from tests.support.report_runs import write_comparison, write_run

SEEDS = range(1, 4)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two methods on two data sets, three seeds each; on `hard` the other method is ahead."""

    def of(score: float) -> dict[int, float]:
        return {seed: score + seed for seed in SEEDS}

    easy = {"fedavg": of(92), "fedfame": of(90), "local": of(80)}
    hard = {"fedavg": of(57), "fedfame": of(60)}
    entries = [("easy", easy), ("hard", hard)]
    return [write_comparison(tmp_path / name, rows, more={"data": {"path": name}}) for name, rows in entries]


def test_ranks_by_hand() -> None:
    assert ranks([3.0, 1.0, None, 2.0, 3.0 + 1e-9]) == [1, 0, 0, 2, 1]
    assert ranks([3.0, 1.0, 2.0, 7.0, None], "aabab") == [2, 0, 1, 1, 0]
    assert ranks([3.0, 1.0, 2.0], "aab") == [1, 2, 0]  # alone, nothing is the best
    assert ranks([3.0, None]) == [1, 0]
    assert ranks([5.0]) == [0]
    assert ranks([]) == []


def test_every_data_set_has_its_best_and_second(folders: list[Path]) -> None:
    grid = score_table(Results(read_entries(folders)))
    assert {label: [value.rank for value in values] for label, values in grid.rows} == {
        "easy: fedavg": [1, 1, 1],
        "easy: fedfame": [2, 2, 2],
        "local": [0, 0, 0],
        "hard: fedavg": [2, 2, 2],
        "hard: fedfame": [1, 1, 1],
    }
    assert grid.title.endswith("; best and second of each data set")
    assert "data set" not in score_table(Results(read_entries(folders[:1]))).title


def test_every_data_set_is_judged(folders: list[Path]) -> None:
    """The reference is `local` where there is one, else the first entry."""
    judged = [(each.entry, each.reference) for each in verdicts(Results(read_entries(folders)))]
    assert judged == [
        ("easy: fedavg", "local"),
        ("easy: fedfame", "local"),
        ("hard: fedfame", "hard: fedavg"),
    ]


def test_measures_are_ranked_by_data_set(folders: list[Path]) -> None:
    for path in [found for folder in folders for found in folder.glob("*/summary.json")]:
        summary = json.loads(path.read_text())
        for silo in summary["silos"].values():
            silo |= {"personalization": silo["test"], "test_time": silo["test"]}
        path.write_text(json.dumps(summary))
    own, _ = measure_tables(Results(read_entries(folders)))
    assert [values[-1].rank for _, values in own.rows] == [1, 2, 0, 2, 1]


OTHERS: dict[str, dict[str, object]] = {
    "more rows": {"test_rows": 21},
    "another metric": {"metric": "f1"},
    "rows that nobody tells": {"test_rows": None},
}


@pytest.mark.parametrize("case", OTHERS)
def test_federations_of_other_data_under_one_configuration(tmp_path: Path, case: str) -> None:
    """A deployed federation's configuration does not name its data."""
    write_run(tmp_path / "one", "fedavg", 1, {"a": 50.0, "b": 60.0})
    write_run(tmp_path / "two", "fedprox", 1, {"a": 51.0, "b": 61.0})
    write_run(tmp_path / "three", "moon", 1, {"a": 90.0, "b": 91.0}, **OTHERS[case])  # type: ignore[arg-type]
    entries = read_entries([tmp_path])
    assert [(each.entry, each.reference) for each in verdicts(Results(entries))] == [("fedprox", "fedavg")]
    assert {label: values[-1].rank for label, values in score_table(Results(entries)).rows} == {
        "fedavg": 2,
        "fedprox": 1,
        "moon": 0,
    }


def test_how_one_test_set_is_shared_does_not_matter(tmp_path: Path) -> None:
    """Of a partitioned data set the number of silos changes nothing about the test rows."""
    few: Mapping[str, float] = dict.fromkeys(("silo-1", "silo-2"), 50.0)
    many: Mapping[str, float] = dict.fromkeys(("silo-1", "silo-2", "silo-3"), 60.0)
    write_run(tmp_path / "few", "fedavg", 1, few, central=True, more={"partition": {"silos": 2}})
    write_run(tmp_path / "many", "fedavg", 1, many, central=True, more={"partition": {"silos": 3}})
    assert len(verdicts(Results(read_entries([tmp_path])))) == 1


def test_seeds_that_cut_other_numbers_of_rows_are_one_row_all_the_same(tmp_path: Path) -> None:
    for method, score in (("fedavg", 50.0), ("moon", 60.0)):
        for seed in (1, 2):
            write_run(tmp_path / f"{method}-{seed}", method, seed, {"a": score}, test_rows=20 + seed)
    entries = read_entries([tmp_path])
    assert [len(entry.runs) for entry in entries] == [2, 2]
