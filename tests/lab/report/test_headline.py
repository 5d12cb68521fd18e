"""The sentence that opens a report: what the silos reach together and alone, whichever is more."""

from __future__ import annotations

from pathlib import Path

import pytest

from silotune.lab.report.entries import read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.html_page import render_page
from silotune.lab.report.significance import headline
from tests.support.report_runs import write_run


def results(folder: Path, scores: dict[str, float], metric: str = "accuracy") -> Results:
    """Three silos a run; the methods' messages are of a kibibyte, but for `local` and `centralised`."""
    runs = [
        write_run(
            folder / method,
            method,
            1,
            {"a": score - 2, "b": score + 2, "c": score},
            message=0 if method in ("local", "centralised") else 1024,
            metric=metric,
        )
        for method, score in scores.items()
    ]
    return Results(read_entries(runs))


@pytest.mark.parametrize(
    ("scores", "metric", "said"),
    [
        (
            {"local": 61.0, "fedavg": 79.2, "ditto": 70.0, "centralised": 90.0},
            "accuracy",
            "Together (fedavg) the three silos label 79 of 100 test rows right, alone 61",
        ),
        (
            {"local": 78.4, "fedavg": 70.8, "fedmcp": 77.6},
            "accuracy",
            "Alone and together (fedmcp) the three silos label 78 of 100 test rows right: sharing does not help here.",
        ),
        (
            {"local": 78.4, "fedavg": 70.8},
            "accuracy",
            "Alone the three silos label 78 of 100 test rows right, together (fedavg) 71: sharing does not help here.",
        ),
        ({"local": 0.5, "fedavg": 0.3}, "perplexity", "reach a test perplexity of 0.3, alone 0.5"),
        (
            {"local": 0.3, "fedavg": 0.5},
            "perplexity",
            "perplexity of 0.3, together (fedavg) 0.5: sharing does not help",
        ),
    ],
)
def test_it_says_what_the_table_says(tmp_path: Path, scores: dict[str, float], metric: str, said: str) -> None:
    found = results(tmp_path, scores, metric)
    assert said in headline(found)
    assert headline(found) in render_page(found, [])


def test_it_admits_chance(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"local-{seed}", "local", seed, {"a": 61.0}, message=0) for seed in (1, 2)]
    runs += [write_run(tmp_path / f"fedavg-{seed}", "fedavg", seed, {"a": 60.0 + 5 * seed}) for seed in (1, 2)]
    assert headline(Results(read_entries(runs))).endswith("alone 61; the difference may be chance.")


@pytest.mark.parametrize("scores", [{"fedavg": 70.0, "ditto": 71.0}, {"local": 70.0, "centralised": 80.0}])
def test_without_both_sides_there_is_none(tmp_path: Path, scores: dict[str, float]) -> None:
    assert headline(results(tmp_path, scores)) == ""
