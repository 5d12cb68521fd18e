"""The best entry is chosen by validation scores, of which losses are better if lower."""

from __future__ import annotations

from pathlib import Path

import pytest

from silotune.errors import InputError
from silotune.lab.report.entries import ReportEntry, read_run
from silotune.lab.report.significance import best_by_validation
from tests.support.report_runs import write_run


def entry(folder: Path, name: str, *runs: tuple[float, int], metric: str = "accuracy") -> ReportEntry:
    """An entry with a run for each (test score, rounds); validation scores are 10 / rounds lower."""
    written = [
        write_run(folder / f"{name}-{seed}", name, seed, {"a": test, "b": test + 2}, rounds=rounds, metric=metric)
        for seed, (test, rounds) in enumerate(runs)
    ]
    return ReportEntry(name, tuple(map(read_run, written)))


def test_test_scores_have_no_part_in_the_choice(tmp_path: Path) -> None:
    # validation: 70 and 72 against 74 and 73
    entries = [entry(tmp_path, "high", (80, 1), (82, 1)), entry(tmp_path, "best", (75, 10), (74, 10))]
    assert best_by_validation(entries).label == "best"
    assert best_by_validation(entries[::-1]).label == "best"
    assert repr(entries[1]) == "ReportEntry('best', seeds 0, 1)"


def test_the_lowest_loss_is_the_best(tmp_path: Path) -> None:
    entries = [entry(tmp_path, "lower", (21, 1), metric="loss"), entry(tmp_path, "higher", (20, 10), metric="loss")]
    assert best_by_validation(entries).label == "lower"


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    entries = [entry(tmp_path, "one", (80, 1)), entry(tmp_path, "other", (80, 1), metric="f1")]
    with pytest.raises(InputError, match="differ in their data or metrics"):
        best_by_validation(entries)
    for silo in entries[0].first.summary["silos"].values():
        silo["validation"] = None
    with pytest.raises(InputError, match="one-0 has no validation score"):
        best_by_validation(entries[:1])
