"""`compare`: a whole comparison from Python: makes its cells, runs them, writes tables and report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from silotune.core.files import make_folder
from silotune.core.process_pool import end_unguarded_worker
from silotune.errors import OR_RESUME, require_unused
from silotune.experiments.comparison import Comparison, read_comparison
from silotune.experiments.report.entries import ReportEntry, read_run
from silotune.experiments.report.html_page import write_report
from silotune.experiments.report.table_files import write_tables
from silotune.experiments.runner import run_cells


def compare(
    source: str,
    *overrides: str,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    only: Sequence[str] = (),
    out: str | Path,
    resume: bool = False,
    workers: int = 1,
) -> dict[str, dict[str, Any]]:
    """Run several methods over several seeds; write their runs, `table.csv` and `report.html`.

    Args:
        source: preset name or path of a YAML file.
        overrides: `key=value` words of every run, or of the comparison (`std.ddof=0`).
        methods: ids of the methods; if empty, those of the source.
        seeds: every method has one run per seed; if empty, the seeds of the source.
        only: patterns of the rows that are wanted; all if empty.
        out: the folder for all of it; must be new or empty unless `resume`.
        resume: continue an interrupted comparison; no finished run is repeated.
        workers: processes that runs are spread over.

    Returns:
        The summary of every run, by the name of its folder (`<method>-<seed>`).

    Raises:
        InputError: a run's configuration cannot work; raised before any training.
        Diverged: some runs diverged, which the message names; raised after all others are finished.
    """
    end_unguarded_worker()
    folder = Path(out)
    if not resume:
        require_unused(folder, "--out", OR_RESUME)
    comparison_words = [f"methods={','.join(methods)}"] if methods else []
    comparison_words += [f"seeds={','.join(map(str, seeds))}"] if seeds else []
    comparison = read_comparison(source, [*overrides, *comparison_words], only=only)
    make_folder(folder, f"--out {folder}")
    comparison.write(folder)
    summaries = run_cells(comparison.cells, folder, workers=workers)
    write_results(entries_of(comparison, folder), folder, comparison.ddof)
    return summaries


def entries_of(comparison: Comparison, folder: Path) -> list[ReportEntry]:
    """Read the finished runs of a comparison, one entry per row of its table."""
    cells = {row: [cell for cell in comparison.cells if cell.row == row] for row in comparison.rows}
    return [
        ReportEntry(row, tuple(read_run(folder / cell.folder) for cell in row_cells))
        for row, row_cells in cells.items()
    ]


def write_results(entries: Sequence[ReportEntry], folder: Path, ddof: int) -> list[Path]:
    """Write the tables and the report; returns their paths."""
    return [*write_tables(entries, folder, ddof), write_report(entries, folder / "report.html", ddof=ddof)]
