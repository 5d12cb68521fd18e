"""`silotune compare` and `silotune sweep`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from silotune.cli.app import app
from silotune.cli.console import console, progress_bars, say
from silotune.core.files import make_folder
from silotune.errors import OR_RESUME, InputError, require_unused

if TYPE_CHECKING:
    from silotune.experiments import Comparison
    from silotune.experiments.sweep import Sweep, Trial


Words = Annotated[
    list[str] | None,
    typer.Argument(
        help="methods=a,b seeds=1,2 std.ddof=1 best=FOLDER (of a sweep) and any key=value of a run",
        metavar="[KEY=VALUE]…",
    ),
]

Searched = Annotated[
    list[str] | None,
    typer.Argument(
        help="method=a,b seeds=1,2; searched: key=a,b,c or key=low..high[:log], per_method.NAME.key=… for one method; "
        "any other key=value of a run",
        metavar="[KEY=VALUE]…",
    ),
]


@app.command()
def compare(
    source: Annotated[str, typer.Argument(help="A preset or a YAML file.", metavar="PRESET_OR_YAML")],
    words: Words = None,
    out: Annotated[Path | None, typer.Option(help="Where run folders, tables and the report go.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on; no finished cell is repeated.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes (give threads=1, or they share the cores).")] = 1,
    ablation: Annotated[bool, typer.Option("--ablation", help="Also the ablations of the method's paper.")] = False,
    variant: Annotated[list[str] | None, typer.Option(help="Your own: 'name: key=value key=value'.")] = None,
) -> None:
    """Several methods over several seeds: one table, `table.csv` and `report.html`."""
    from silotune.experiments import Cell, read_comparison, run_cells

    out = _unused(out, resume, "compare")
    found = read_comparison(source, words or [], variant or [], ablation)
    make_folder(out, f"--out {out}")
    found.write(out)

    with progress_bars() as bars:

        def done(cell: Cell, summary: dict[str, Any]) -> None:
            for task in bars.progress.task_ids:
                bars.progress.remove_task(task)
            say(f"{cell.folder}: {summary['average']:.2f} ({summary['seconds']:.0f} s)")

        run_cells(found.cells, out, workers=workers, bars=bars, done=done, announce=say)
    _show(found, out)


@app.command()
def sweep(
    source: Annotated[str, typer.Argument(help="A preset or a YAML file.", metavar="PRESET_OR_YAML")],
    words: Searched = None,
    out: Annotated[Path | None, typer.Option(help="Where trials, sweep.csv and best.yaml go.")] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Proposals a method (optuna's TPE); without it, every combination.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on; no finished trial is repeated.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes (give threads=1, or they share the cores).")] = 1,
) -> None:
    """Search learning rates and other keys for each method, on validation rows alone: `sweep.csv` and `best.yaml`."""
    from silotune.experiments import Cell
    from silotune.experiments.sweep import TABLE, read_sweep, run_sweep

    out = _unused(out, resume, "sweep")
    found = read_sweep(source, words or [], trials)
    make_folder(out, f"--out {out}")

    with progress_bars() as bars:

        def done(cell: Cell, summary: dict[str, Any]) -> None:
            for task in bars.progress.task_ids:
                bars.progress.remove_task(task)
            score = summary["validation"]
            say(f"{cell.folder}: {summary['reason'] if score is None else f'{score:.2f}'}")

        finished = run_sweep(found, out, workers=workers, bars=bars, done=done)
    console.print(_trials(found, finished))
    say(f"wrote {out / TABLE}, {out / 'best.yaml'}; silotune compare {source} best={out} … takes each method's best")


def _unused(out: Path | None, resume: bool, command: str) -> Path:
    if out is None:
        raise InputError(f"--out: is missing; {command} needs a folder for its runs")
    if not resume:
        require_unused(out, "--out", OR_RESUME)
    return out


def _trials(found: Sweep, trials: Sequence[Trial]) -> Table:
    """Every trial with its validation score; the best of each method in bold."""
    from silotune.experiments.sweep import best_trial

    table = Table(title="validation score (%) at each trial's best round")
    for column in ("method", "trial", *found.keys, "validation"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in found.spaces:
        best = best_trial(trials, method)
        for trial in (trial for trial in trials if trial.method == method):
            known = [score for score in trial.scores if score is not None]
            score = "diverged" if trial.score is None else f"{trial.score:.2f}"
            if trial.score is not None and len(known) > 1:
                score += f" ± {statistics.stdev(known):.2f}"
            values = ["" if (value := trial.chosen.get(key)) is None else escape(f"{value}") for key in found.keys]
            table.add_row(method, str(trial.number), *values, score, style="bold" if trial is best else None)
        table.add_section()
    return table


def _show(found: Comparison, out: Path) -> None:
    from silotune.experiments.compare import entries_of, write_results
    from silotune.experiments.report.significance import NOTE, paired_tests
    from silotune.experiments.report.tables_by_method import as_terminal, cost_table, score_table

    entries, ddof = entries_of(found, out), found.ddof
    console.print(as_terminal(score_table(entries, ddof), console.width))
    console.print(as_terminal(cost_table(entries), console.width))
    for pair in (pairs := paired_tests(entries)):
        say(f"{pair.best} − {pair.other}: {pair.difference:+.2f} points, p = {pair.p:.3g} ({pair.pairs} pairs)")
    if pairs:
        say(NOTE)
    say(f"wrote {', '.join(str(path) for path in write_results(entries, out, ddof))}")
