"""The command line, and run folders with known numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from silotune.lab.report.entries import read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.html_page import write_report
from tests.support.report_runs import write_run

FEDMCP_TERMS = ("full", "backbone", "contrastive", "similarity_private")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods over seeds 1, 2, 3 and the silos east and west; `sharing` is far ahead of `alone`."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2, 3):
        write_run(folder / f"alone-{seed}", "local", seed, {"east": 60.0 + seed, "west": 50.0 + seed}, message=0)
        tests = {"east": 70.0 + 2 * seed, "west": 71.0 - seed}
        write_run(folder / f"sharing-{seed}", "fedmcp", seed, tests, terms=FEDMCP_TERMS)
        write_run(folder / f"large-{seed}", "fedavg-full", seed, {"east": 70.5, "west": 66.5}, message=2**30)
    return folder


@pytest.fixture(scope="session")
def written(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of `runs`, with its figures."""
    return write_report(Results(read_entries([runs])), tmp_path_factory.mktemp("page") / "report.html")
