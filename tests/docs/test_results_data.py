"""Tables of result pages are those that their data make, and what is kept of runs says the same as the runs."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.results_data import DATA, MOST_BYTES, PAGES, keep, results_of, with_tables
from silotune.lab.report.entries import read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.judging import verdicts
from silotune.lab.report.table_files import as_markdown
from silotune.lab.report.tables import score_table
from tests.lab.report.test_verdicts import two_entries


def test_pages_hold_the_tables_of_their_data():
    for page in PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert text == with_tables(text), f"{page.name}: run python -m scripts.results_data pages"


def test_data_stay_small():
    assert sum(file.stat().st_size for file in DATA.rglob("*") if file.is_file()) <= MOST_BYTES


@pytest.fixture
def comparison(tmp_path):
    draws = np.random.default_rng(1)
    right = {"local": draws.random((3, 2, 200)) < 0.7, "fedavg": draws.random((3, 2, 200)) < 0.8}
    two_entries(tmp_path / "runs", right, dict.fromkeys((1, 2, 3), np.arange(200) % 2))
    return tmp_path / "runs"


def test_what_is_kept_makes_the_same_tables_and_verdicts(comparison, tmp_path):
    folder = keep("made", comparison, tmp_path / "data")
    assert {file.name for file in folder.iterdir()} == {"runs.json", "rows.parquet"}
    before, after = Results(read_entries([comparison])), results_of("made", tmp_path / "data")
    assert as_markdown(score_table(after)) == as_markdown(score_table(before))
    assert [(each.text, each.mean, each.interval) for each in verdicts(after)] == [
        (each.text, each.mean, each.interval) for each in verdicts(before)
    ]


def test_a_table_that_differs_from_its_data_is_made_anew(comparison, tmp_path):
    keep("made", comparison, tmp_path / "data")
    stale = "Before.\n<!-- data: made verdicts -->\n| 99.9 |\n<!-- end of data -->\nAfter.\n"
    page = with_tables(stale, tmp_path / "data")
    assert "99.9" not in page
    assert "fedavg − local" in page
    assert page.startswith("Before.\n")
    assert page.endswith("<!-- end of data -->\nAfter.\n")
    assert with_tables(page, tmp_path / "data") == page
