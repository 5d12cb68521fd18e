"""Run a comparison, or report on finished runs, from Python or the command line."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from silotune.config import Config
from silotune.config.keys import Keys
from silotune.core.files import make_folder
from silotune.core.workers import Workers, end_unguarded_worker
from silotune.errors import OR_RESUME, InputError, SilotuneError, require_unused
from silotune.lab import runner
from silotune.lab.comparison import Comparison, read_comparison, words_of
from silotune.lab.report.drawing import draw_figure
from silotune.lab.report.entries import ReportEntry, read_entries, read_run
from silotune.lab.report.figures import rounds_figure
from silotune.lab.report.frame import Results
from silotune.lab.report.html_page import write_report
from silotune.lab.report.judging import verdicts
from silotune.lab.report.judging_plan import JudgingPlan
from silotune.lab.report.significance import best_by_validation
from silotune.lab.report.table_files import comparison_frame, scores_as_html, scores_as_text, write_tables
from silotune.lab.report.verdicts import Verdict
from silotune.runs.run_result import Run, load_run

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_TEXTS = ("method", "silo", "metric")
"""Columns of `table.csv` that are no numbers."""


def compare(
    source: str | Config,
    *overrides: str,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    only: Sequence[str] = (),
    out: str | Path,
    resume: bool = False,
    workers: int | Workers = 1,
    variants: Sequence[str] = (),
    progress: bool | runner.Listener | None = None,
    **keys: Unpack[Keys],
) -> ComparisonResult:
    """Run several methods over several seeds; write their runs, `table.csv` and `report.html`.

    The section `compare` has the rest, such as the papers' ablations: `compare={"ablation": True}`.

    Args:
        source: preset name, path of a YAML file, or a `Config`. For methods other than its own, the keys of a `Config`
            act as preset values: the method's default tuner and aggregation come first.
        overrides: `key=value` words of every run, or of the comparison (`std.ddof=0`).
        methods: ids of the methods; if empty, those of the source.
        seeds: every method has one run per seed; if empty, the seeds of the source.
        only: patterns of the rows that are wanted; all if empty.
        out: the folder for all of it; must be new or empty unless `resume`.
        resume: continue an interrupted comparison; no finished run is repeated.
        workers: processes that runs are spread over, or `Workers` on a Ray cluster.
        variants: further entries, each "name: key=value key=value".
        progress: whether to show progress, as for `run`, or what is called while the runs are done.
        keys: keys of every run; a group of keys is a dictionary.

    Returns:
        The comparison: a mapping from each run's name (`<method>-<seed>`) to its summary.

    Raises:
        Diverged: some runs diverged, which the message names; raised after all others are finished.
    """
    end_unguarded_worker()
    comparison = read_comparison(source, [*overrides, *words_of(methods, seeds)], variants, only=only, **keys)
    return run_comparison(comparison, Path(out), resume, Workers.of(workers), runner.listener_of(progress))


def run_comparison(
    planned: Comparison,
    folder: Path,
    resume: bool,
    workers: Workers,
    listener: runner.Listener,
    elsewhere: runner.Elsewhere | None = None,
) -> ComparisonResult:
    """Do the runs of a comparison here, or `elsewhere`, as over a federation; see `compare`.

    Raises:
        SilotuneError: some runs failed elsewhere; files about the others are written.
    """
    if not resume:
        require_unused(folder, "--out", OR_RESUME)
    comparison = replace(planned, judging=planned.judging.settled(JudgingPlan.read(folder)))
    failure = None
    if elsewhere is not None:
        begun = partial(comparison.write, folder)
        summaries, failure = runner.run_elsewhere(comparison.cells, folder, elsewhere, begun)
        for cell in comparison.cells:
            if cell.folder in summaries:
                listener.done(cell, summaries[cell.folder])
    else:
        runner.check_cells(comparison.cells, folder, workers)
        make_folder(folder, f"--out {folder}")
        comparison.write(folder)
        summaries = runner.run_cells(comparison.cells, folder, workers=workers, listener=listener)
    results = Results(entries_of(comparison, folder, summaries), comparison.ddof, comparison.judging)
    files = [*write_tables(results, folder), write_report(results, folder / "report.html")]
    comparison.judging.look(folder, len(comparison.seeds))
    if failure is not None:
        raise SilotuneError(f"{failure}; {files[0]} has the finished ones") from failure
    return ComparisonResult(folder, comparison, results, summaries, files)


class ComparisonResult(dict[str, dict[str, Any]]):
    """A finished comparison: a mapping from each run's name to its summary, with its table, verdicts and files.

    Attributes:
        folder: the folder of the runs and files.
        comparison: what was compared.
        results: the numbers of its table.
        entries: the rows of its table.
        files: the written tables and report.
    """

    def __init__(
        self,
        folder: Path,
        comparison: Comparison,
        results: Results,
        summaries: Mapping[str, dict[str, Any]],
        files: Sequence[Path],
    ) -> None:
        super().__init__(summaries)
        self.folder = folder
        self.comparison = comparison
        self.results = results
        self.entries = results.entries
        self.files = tuple(files)

    def run(self, name: str) -> Run:
        """Open one run, with its silos' models.

        Args:
            name: a key of this mapping.
        """
        self[name]
        return load_run(self.folder / name)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What the rule says of each entry against the reference."""
        return verdicts(self.results)

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.files[-1]

    def best(self) -> str:
        """Return the label of the entry with the best validation score, its mean over silos and seeds.

        Test scores have no part in the choice; they say what the chosen entry is worth.
        """
        return best_by_validation(self.entries).label

    def plot(self) -> Figure:
        """Draw validation scores by round, a line for every entry and a diagram for every silo and their mean."""
        spec = rounds_figure(self.results)
        if not spec.panels:
            raise InputError("plot: the runs have no validation scores; allowed: runs with validation rows")
        return draw_figure(spec)

    def as_json(self) -> dict[str, Any]:
        """Return the table's rows, the verdicts, all runs' summaries and the paths of the files, as JSON values."""
        rows = comparison_frame(self.results).to_dict("records")
        table = [
            {str(key): value if key in _TEXTS else float(value) if value else None for key, value in row.items()}
            for row in rows
        ]
        return {
            "folder": str(self.folder),
            "table": table,
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "runs": {name: dict(summary) for name, summary in self.items()},
            "files": [str(path) for path in self.files],
        }

    def to_pandas(self) -> pandas.DataFrame:
        """Return `table.csv`: a row for every entry and silo, with mean and standard deviation over seeds."""
        return _numeric(comparison_frame(self.results))

    def __repr__(self) -> str:
        return f"ComparisonResult({str(self.folder)!r}): {scores_as_text(self.results)}"

    def _repr_html_(self) -> str:
        return scores_as_html(self.results)


def entries_of(comparison: Comparison, folder: Path, finished: Container[str]) -> list[ReportEntry]:
    """Read the finished runs of a comparison, one entry per row of its table."""
    cells = {
        entry: [cell for cell in comparison.cells if cell.entry == entry and cell.folder in finished]
        for entry in comparison.entries
    }
    return [
        ReportEntry(row, tuple(read_run(folder / cell.folder) for cell in row_cells))
        for row, row_cells in cells.items()
        if row_cells
    ]


def _numeric(table: pandas.DataFrame) -> pandas.DataFrame:
    """Convert numeric columns from text to numbers; empty cells become NaN."""
    import pandas

    return table.apply(lambda column: column if column.name in _TEXTS else pandas.to_numeric(column))


def report(
    runs: Iterable[str | Path | Run | ComparisonResult] | str | Path | Run | ComparisonResult,
    out: str | Path = "report.html",
    *,
    ddof: int = 1,
    title: str = "",
    against: str = "",
    margin: float | None = None,
) -> Report:
    """Write one self-contained HTML page about finished runs; figures also as PNG and SVG beside it.

    Args:
        runs: runs, comparisons or their folders; one or several.
        out: the HTML file.
        ddof: the standard deviation over n seeds has the divisor n − ddof.
        title: the page's title.
        against: the entry that the others are judged against; by default as the one comparison has it, else `local`.
        margin: a smaller difference, in points, does not matter; by default as the one comparison has it, else 1.
    """
    path = Path(out)
    if path.is_dir():
        raise InputError(f"--out {path}: is a folder; give the HTML file's path")
    several = [runs] if isinstance(runs, (str, Path, Run, ComparisonResult)) else [*runs]
    folders = [run.folder if isinstance(run, (Run, ComparisonResult)) else Path(run) for run in several]
    plan = (JudgingPlan.read(folders[0]) if len(folders) == 1 else None) or JudgingPlan()
    plan = replace(plan, against=against or plan.against, margin=plan.margin if margin is None else margin)
    results = Results(read_entries(folders), ddof, plan)
    return Report(write_report(results, path, title), results)


@dataclass(frozen=True, repr=False)
class Report:
    """A page about finished runs.

    Attributes:
        path: the HTML file.
        results: the numbers of its tables.
    """

    path: Path
    results: Results

    @property
    def entries(self) -> tuple[ReportEntry, ...]:
        """The rows of its tables."""
        return self.results.entries

    def to_pandas(self) -> pandas.DataFrame:
        """Return the scores: a row for every entry and silo, with mean and standard deviation over seeds."""
        return _numeric(comparison_frame(self.results))

    def __repr__(self) -> str:
        return f"Report({str(self.path)!r}): {scores_as_text(self.results)}"

    def _repr_html_(self) -> str:
        """Return the table of scores that a notebook shows."""
        return scores_as_html(self.results)
