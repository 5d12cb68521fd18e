"""The command `silotune sweep`: progress bars, and the printed table of trials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from silotune.cli.console import LogFile, Quiet, Source, Verbose, console, output_folder, say
from silotune.cli.workers import (
    IN_PROCESS,
    AddressOption,
    EngineOption,
    FederationOption,
    WorkersOption,
    elsewhere_of,
    workers_of,
)

if TYPE_CHECKING:
    from silotune.lab.comparison import Cell
    from silotune.lab.search_space import Sweep
    from silotune.lab.sweep import TrialResult

SweepWords = Annotated[
    list[str] | None,
    typer.Argument(
        help="method=a,b seeds=1,2; searched: key=a,b,c or key=low..high[:log], per_method.NAME.key=… for one method; "
        "any other key=value of a run",
        metavar="[KEY=VALUE]…",
    ),
]


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
    federation: FederationOption = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Search learning rates and other keys for each method, on validation rows alone: `sweep.csv` and `best.yaml`."""
    where = workers_of(engine, workers, address)
    from silotune.cli.progress import CellCount, show_progress
    from silotune.lab.sweep import sweep as run_all

    folder, count = output_folder(out, "sweep"), CellCount()
    with show_progress(quiet, verbose, log_file) as followers:

        def done(cell: Cell, summary: dict[str, Any]) -> None:
            followers.clear()
            score = summary["validation"]
            say(f"{cell.folder}: {summary['reason'] if score is None else f'{score:.2f}'}{count.next()}")

        finished = run_all(
            source,
            *(words or []),
            out=folder,
            trials=trials,
            resume=resume,
            workers=where,
            callbacks=followers,
            begin=count.begin,
            done=done,
            elsewhere=elsewhere_of(federation, where, folder, say),
        )
    console.print(_trials_table(finished.plan, finished.trials))
    say(
        f"wrote {', '.join(map(str, finished.files))}; silotune compare {source} best={folder} … takes each method's "
        "best"
    )


def _trials_table(search: Sweep, trials: Sequence[TrialResult]) -> Table:
    """Make a table of all trials with their validation scores; each method's best trial is bold."""
    from silotune.lab.sweep import best_trial

    table = Table(title="validation score at each trial's best round")
    for column in ("method", "trial", *search.keys, "validation"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in search.spaces:
        best = best_trial(trials, method)
        for trial in (trial for trial in trials if trial.method == method):
            score = "diverged" if trial.score is None else f"{trial.score:.2f}"
            score += "" if trial.std is None else f" ± {trial.std:.2f}"
            values = ["" if (value := trial.chosen.get(key)) is None else escape(f"{value}") for key in search.keys]
            table.add_row(method, str(trial.number), *values, score, style="bold" if trial is best else None)
        table.add_section()
    return table
