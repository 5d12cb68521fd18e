"""Folders of comparisons, alone and together with others: which runs are one row, and what it is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from silotune.lab.report.entries import read_entries
from tests.support.report_runs import write_comparison, write_run

SST2, MRPC = ({"data": {"tasks": [task]}} for task in ("SST-2", "MRPC"))


def rows(*folders: Path) -> dict[str, list[tuple[int, float]]]:
    """Label → (seed, average) of its runs."""
    return {entry.label: [(run.seed, run.summary["average"]) for run in entry.runs] for entry in read_entries(folders)}


def test_a_comparison_names_its_rows(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "compared", {"local": {1: 50.0, 2: 51.0}, "fedavg": {1: 60.0, 2: 61.0}})
    write_run(folder / "another", "moon", 1, {"a": 40.0})
    assert rows(folder) == {
        "local": [(1, 50.0), (2, 51.0)],
        "fedavg": [(1, 60.0), (2, 61.0)],
        "moon": [(1, 40.0)],
    }


def test_rows_of_one_name_on_other_data_stay_apart(tmp_path: Path) -> None:
    one = write_comparison(tmp_path / "table45-sst2", {"fedavg": {1: 90.0}, "fedfame": {1: 91.0}}, more=SST2)
    other = write_comparison(tmp_path / "table45-mrpc", {"fedavg": {1: 80.0}, "moon": {1: 70.0}}, more=MRPC)
    assert rows(one, other) == {
        "table45-sst2: fedavg": [(1, 90.0)],
        "fedfame": [(1, 91.0)],
        "table45-mrpc: fedavg": [(1, 80.0)],
        "moon": [(1, 70.0)],
    }


def test_folders_of_one_name_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write_comparison(tmp_path / "one" / "table", {"fedavg": {1: 90.0}}, more=SST2)
    other = write_comparison(tmp_path / "other" / "table", {"fedavg": {1: 80.0}}, more=MRPC)
    monkeypatch.chdir(one)
    assert rows(Path(), other) == {"table: fedavg": [(1, 90.0)], "table: fedavg #2": [(1, 80.0)]}


def test_more_seeds_of_one_configuration_join(tmp_path: Path) -> None:
    one = write_comparison(tmp_path / "one", {"fedavg": {1: 90.0}}, more=SST2 | {"compare": {"seeds": [1]}})
    other = write_comparison(tmp_path / "two", {"fedavg": {2: 80.0}}, more=SST2 | {"compare": {"seeds": [2]}})
    assert rows(one, other) == {"fedavg": [(1, 90.0), (2, 80.0)]}


def test_a_run_stays_in_its_comparison_in_any_order(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "compared", {"fedavg": {1: 60.0, 2: 61.0}})
    free = write_run(tmp_path / "free", "fedavg", 3, {"a": 62.0})
    expected = {"fedavg": [(1, 60.0), (2, 61.0)], "fedavg #2": [(3, 62.0)]}
    for given in ((folder, folder / "fedavg-1", free), (folder / "fedavg-1", free, folder)):
        assert rows(*given) == expected
