"""The commands `silotune compare` and `silotune sweep`, with their progress bars and printed tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from silotune.cli.app import TRAIN, app
from silotune.cli.completion import complete_source
from silotune.cli.console import JsonOption, LogFile, Quiet, Source, Verbose, console, say, say_aside
from silotune.cli.workers import IN_PROCESS, AddressOption, EngineOption, WorkersOption, workers_of
from silotune.errors import InputError, unknown_name_error

if TYPE_CHECKING:
    from silotune.experiments import Cell
    from silotune.experiments.compare import ComparisonResult
    from silotune.experiments.sweep import Sweep, TrialResult


ComparisonWords = Annotated[
    list[str] | None,
    typer.Argument(
        help="methods=a,b seeds=1,2 std.ddof=1 best=FOLDER (of a sweep) and any key=value of a run",
        metavar="[KEY=VALUE]…",
    ),
]

SweepWords = Annotated[
    list[str] | None,
    typer.Argument(
        help="method=a,b seeds=1,2; searched: key=a,b,c or key=low..high[:log], per_method.NAME.key=… for one method; "
        "any other key=value of a run",
        metavar="[KEY=VALUE]…",
    ),
]


@app.command(rich_help_panel=TRAIN)
def compare(
    source: Annotated[
        str | None,
        typer.Argument(help="A preset or a YAML file.", metavar="PRESET_OR_YAML", autocompletion=complete_source),
    ] = None,
    words: ComparisonWords = None,
    out: Annotated[Path | None, typer.Option(help="Where run folders, tables and the report go.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on; no finished cell is repeated.")] = False,
    engine: EngineOption = IN_PROCESS,
    workers: WorkersOption = None,
    address: AddressOption = None,
    ablation: Annotated[bool, typer.Option("--ablation", help="Also the ablations of the method's paper.")] = False,
    variant: Annotated[list[str] | None, typer.Option(help="Another entry: 'name: key=value …'; repeatable.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Rows of these names ('fedavg-rte-*'); repeatable.")] = None,
    list_items: Annotated[
        bool, typer.Option("--list", help="The papers' tables and figures, and what makes them.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
    as_json: JsonOption = False,
) -> None:
    """Several methods over several seeds: one table, `table.csv` and `report.html`.

    With --list: every table and figure of the four papers, with the command that makes it.
    """
    if list_items:
        _list_items(source)
        return
    if source is None:
        raise InputError("compare: name a preset or a YAML file (silotune compare --list has the papers' tables)")
    where = workers_of(engine, workers, address)
    from silotune.cli.progress import show_progress
    from silotune.experiments.compare import compare as run_all
    from silotune.experiments.report.scores import average_text

    folder = _output_folder(out, "compare")
    tell = say_aside if as_json else say
    with show_progress(quiet, verbose, log_file, write=tell) as followers:

        def done(cell: Cell, summary: dict[str, Any]) -> None:
            followers.clear()
            tell(f"{cell.folder}: {average_text(summary)} ({summary['seconds']:.0f} s)")

        finished = run_all(
            source,
            *(words or []),
            out=folder,
            resume=resume,
            workers=where,
            variants=variant or [],
            ablation=ablation,
            only=only or [],
            callbacks=followers,
            done=done,
            announce=tell,
        )
    if as_json:
        typer.echo(json.dumps(finished.as_json(), indent=1))
    else:
        _show(finished)


@app.command(rich_help_panel=TRAIN)
def sweep(
    source: Source,
    words: SweepWords = None,
    out: Annotated[Path | None, typer.Option(help="Where trials, sweep.csv and best.yaml go.")] = None,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="Trials per method, proposed by optuna's TPE; without it, all combinations."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on; no finished trial is repeated.")] = False,
    engine: EngineOption = IN_PROCESS,
    workers: WorkersOption = None,
    address: AddressOption = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Search learning rates and other keys for each method, on validation rows alone: `sweep.csv` and `best.yaml`."""
    where = workers_of(engine, workers, address)
    from silotune.cli.progress import show_progress
    from silotune.experiments.sweep_result import sweep as run_all

    folder = _output_folder(out, "sweep")
    with show_progress(quiet, verbose, log_file) as followers:

        def done(cell: Cell, summary: dict[str, Any]) -> None:
            followers.clear()
            score = summary["validation"]
            say(f"{cell.folder}: {summary['reason'] if score is None else f'{score:.2f}'}")

        finished = run_all(
            source,
            *(words or []),
            out=folder,
            trials=trials,
            resume=resume,
            workers=where,
            callbacks=followers,
            done=done,
        )
    console.print(_trials_table(finished.plan, finished.trials))
    say(
        f"wrote {', '.join(map(str, finished.files))}; silotune compare {source} best={folder} … takes each method's "
        "best"
    )


def _list_items(paper: str | None) -> None:
    """Print the papers' items and their commands; `paper` is the id of one paper, or None."""
    from silotune.experiments.paper_items import read_papers

    papers = read_papers()
    if paper is not None and paper not in papers:
        raise unknown_name_error("paper", paper, papers)
    for name, entry in papers.items():
        if paper in (None, name):
            say(f"\n{entry.title} ({name})")
            for item in entry.items:
                say(f"  {item.name}: {item.shows}")
                for command in item.commands:
                    say(f"      {command}")


def _output_folder(out: Path | None, command: str) -> Path:
    """Check that the `--out` option is given.

    Raises:
        InputError: it is missing.
    """
    if out is None:
        raise InputError(f"--out: is missing; {command} needs a folder for its runs")
    return out


def _trials_table(search: Sweep, trials: Sequence[TrialResult]) -> Table:
    """Make a table of all trials with their validation scores; each method's best trial is bold."""
    from silotune.experiments.sweep import best_trial

    table = Table(title="validation score at each trial's best round")
    for column in ("method", "trial", *search.keys, "validation"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in search.spaces:
        best = best_trial(trials, method)
        for trial in (trial for trial in trials if trial.method == method):
            scores = [score for score in trial.scores if score is not None]
            score = "diverged" if trial.score is None else f"{trial.score:.2f}"
            if trial.score is not None and len(scores) > 1:
                score += f" ± {statistics.stdev(scores):.2f}"
            values = ["" if (value := trial.chosen.get(key)) is None else escape(f"{value}") for key in search.keys]
            table.add_row(method, str(trial.number), *values, score, style="bold" if trial is best else None)
        table.add_section()
    return table


def _show(finished: ComparisonResult) -> None:
    """Print the tables of a finished comparison, its tests and files."""
    from silotune.experiments.report.significance import NOTE
    from silotune.experiments.report.tables_by_method import as_terminal, cost_table, score_table

    entries = finished.entries
    console.print(as_terminal(score_table(entries, finished.comparison.ddof), console.width))
    console.print(as_terminal(cost_table(entries), console.width))
    for pair in (pairs := finished.tests):
        say(f"{pair.best} − {pair.other}: {pair.difference:+.2f} points, p = {pair.p:.3g} ({pair.pairs} pairs)")
    if pairs:
        say(NOTE)
    say(f"wrote {', '.join(map(str, finished.files))}")
