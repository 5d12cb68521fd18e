"""The error of averaging LoRA's A and B in a report: a curve per method, a column of the tables; as by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from silotune.lab.report.drawing import save_figure
from silotune.lab.report.entries import ReportEntry, read_entries
from silotune.lab.report.figures import product_error_figure
from silotune.lab.report.frame import Results
from silotune.lab.report.html_page import list_caveats, write_report
from silotune.lab.report.table_files import as_markdown, comparison_frame
from silotune.lab.report.tables import cost_table
from tests.support.report_runs import curve, write_run

ERRORS = {1: (0.2, 0.1, 0.3), 2: (0.4, 0.3, 0.5)}
"""Seed → error by round."""


def errors(values: tuple[float, ...]) -> list[dict[str, object]]:
    return [{"event": "aggregation", "round": n + 1, "product_error": value} for n, value in enumerate(values)]


@pytest.fixture
def entries(tmp_path: Path) -> list[ReportEntry]:
    runs = [
        write_run(tmp_path / f"fedlr-{seed}", "fedlr", seed, {"a": 60.0 + seed}, extra=errors(values))
        for seed, values in ERRORS.items()
    ]
    runs.append(write_run(tmp_path / "fedex", "fedex-lora", 1, {"a": 70.0}, extra=errors((1e-9, 1e-9, 0.0))))
    runs.append(write_run(tmp_path / "fedmcp", "fedmcp", 1, {"a": 65.0}))
    return read_entries(runs)


def of(entries: list[ReportEntry], method: str) -> ReportEntry:
    return next(entry for entry in entries if entry.first.summary["method"] == method)


def test_the_curve_by_hand(entries: list[ReportEntry]) -> None:
    found = curve(of(entries, "fedlr"), "product_error")
    assert found["x"] == [1, 2, 3]
    assert found["mean"] == pytest.approx([0.3, 0.2, 0.4])
    assert found["std"] == pytest.approx([2**0.5 / 10] * 3)
    assert Results([found := of(entries, "fedlr")]).product_error(found.label) == pytest.approx(0.3)
    assert Results([found := of(entries, "fedmcp")]).product_error(found.label) is None


def test_a_column_of_the_tables(entries: list[ReportEntry]) -> None:
    table = cost_table(Results(entries))
    assert table.header[-1] == "product error %"
    assert {label: cells[-1].text for label, cells in table.rows} == {
        of(entries, "fedlr").label: "30.00",
        of(entries, "fedex-lora").label: "0.00",
        of(entries, "fedmcp").label: "–",
    }
    assert "product error %" in as_markdown(table)
    rows = comparison_frame(Results(entries)).to_dict("records")
    assert {row["method"]: row["product_error"] for row in rows} == {
        of(entries, "fedlr").label: "0.3",
        of(entries, "fedex-lora").label: "6.66667e-10",
        of(entries, "fedmcp").label: "",
    }


@pytest.mark.usefixtures("no_figure_files")
def test_the_figure_has_a_line_for_every_method_with_pairs(entries: list[ReportEntry], tmp_path: Path) -> None:
    spec = product_error_figure(Results(entries))
    assert set(spec.legend.values()) == {of(entries, name).label for name in ("fedlr", "fedex-lora")}
    assert f"No product is averaged: {of(entries, 'fedmcp').label}." in spec.caption
    page = write_report(Results(entries), tmp_path / "report.html").read_text(encoding="utf-8")
    assert not any("aggregation" in remark for remark in list_caveats(Results(entries))), "nothing to warn of"
    assert '<section id="product_error"' in page
    assert "Error of averaging A and B" in page
    files = {path.name: path.stat().st_size for path in save_figure(spec, tmp_path)}
    assert files.keys() == {"product_error.png", "product_error.svg"}
    assert min(files.values()) > 2000


@pytest.mark.usefixtures("no_figure_files")
def test_reports_without_pairs_stay_as_they_were(entries: list[ReportEntry], tmp_path: Path) -> None:
    alone = [of(entries, "fedmcp")]
    assert not product_error_figure(Results(alone)).panels
    assert cost_table(Results(alone)).header[-1] == "seconds"
    assert "product_error" not in comparison_frame(Results(alone))
    page = write_report(Results(alone), tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'id="product_error"' not in page


def test_a_run_and_what_follows_it_have_it(reference) -> None:
    run, _ = reference("lora-fair")
    found = [ended.product_error for ended in run.history]
    assert len(found) == 2
    assert all(error is not None and 0 <= error < 1 for error in found)
    lines = run.to_pandas()
    for ended in run.history:
        assert ended.scalars()["product_error/coordinator"] == ended.product_error
        assert set(lines[lines["round"] == ended.round]["product_error"]) == {ended.product_error}
    other, _ = reference("fedmcp")
    assert all(ended.product_error is None for ended in other.history)
    assert "product_error" not in other.to_pandas()
    assert not any("product_error" in name for ended in other.history for name in ended.scalars())
