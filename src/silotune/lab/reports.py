"""`report` writes the page about finished runs, for Python and `silotune report`; `Report`: its table and path."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from silotune.errors import InputError
from silotune.lab.compare import ComparisonResult
from silotune.lab.report.entries import ReportEntry, read_entries
from silotune.lab.report.html_page import write_report
from silotune.lab.report.shown_scores import scores_as_html, scores_as_text
from silotune.lab.report.table_files import table_csv
from silotune.runs.run_result import Run

if TYPE_CHECKING:
    import pandas


def report(
    runs: Iterable[str | Path | Run | ComparisonResult] | str | Path | Run | ComparisonResult,
    out: str | Path = "report.html",
    *,
    ddof: int = 1,
    title: str = "",
) -> Report:
    """Write one self-contained HTML page about finished runs; figures also as PNG and SVG beside it.

    Args:
        runs: runs, comparisons or their folders; one or several.
        out: the HTML file.
        ddof: the standard deviation over n seeds has the divisor n − ddof.
        title: the page's title.
    """
    path = Path(out)
    if path.is_dir():
        raise InputError(f"--out {path}: is a folder; give the HTML file's path")
    several = [runs] if isinstance(runs, (str, Path, Run, ComparisonResult)) else [*runs]
    folders = [run.folder if isinstance(run, (Run, ComparisonResult)) else Path(run) for run in several]
    entries = read_entries(folders)
    return Report(write_report(entries, path, ddof=ddof, title=title), tuple(entries), ddof)


@dataclass(frozen=True, repr=False)
class Report:
    """A page about finished runs.

    Attributes:
        path: the HTML file.
        entries: the rows of its tables.
        ddof: the standard deviation over n seeds has the divisor n − ddof.
    """

    path: Path
    entries: tuple[ReportEntry, ...]
    ddof: int = 1

    def to_pandas(self) -> pandas.DataFrame:
        """Return the scores: a row for every entry and silo, with mean and standard deviation over seeds."""
        import pandas

        return pandas.read_csv(io.StringIO(table_csv(self.entries, self.ddof)))

    def __repr__(self) -> str:
        return f"Report({str(self.path)!r}): {scores_as_text(self.entries, self.ddof)}"

    def _repr_html_(self) -> str:
        """Return the table of scores that a notebook shows."""
        return scores_as_html(self.entries, self.ddof)
