"""The commands `silotune compare` and `sweep`: printed tables, and the list of the papers' items."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silotune.cli.console import (
    JsonOption,
    LogFile,
    Quiet,
    Source,
    Verbose,
    complete_source,
    console,
    new_table,
    say,
    say_aside,
)
from silotune.cli.workers import (
    IN_PROCESS,
    AddressOption,
    EngineOption,
    FederationOption,
    WorkersOption,
    elsewhere_of,
    workers_of,
)
from silotune.errors import InputError, unknown_name_error
from silotune.lab.commands.verdicts import AgainstOption, MarginOption, show_verdicts

if TYPE_CHECKING:
    from silotune.lab.compare import ComparisonResult
    from silotune.lab.comparison import Cell
    from silotune.lab.runner import Listener


ComparisonWords = Annotated[
    list[str] | None,
    typer.Argument(
        help="methods=a,b seeds=1,2 std.ddof=1 best=FOLDER (of a sweep) and any key=value of a run",
        metavar="[KEY=VALUE]…",
    ),
]


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
    federation: FederationOption = None,
    ablation: Annotated[bool, typer.Option("--ablation", help="Also the ablations of the method's paper.")] = False,
    variant: Annotated[
        list[str] | None, typer.Option(help="In place of the file's variants: 'name: key=value …'; repeatable.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Entries of these names ('fedavg-rte-*'); repeatable.")] = None,
    against: AgainstOption = "",
    margin: MarginOption = None,
    list_items: Annotated[
        bool, typer.Option("--list", help="The papers' tables and figures, and what makes them.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the first run of every entry, list the entries, and stop.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods over several seeds: one table, `table.csv` and `report.html`.

    With --list: every table and figure of the four papers, with the command that makes it.
    """
    if list_items:
        _list_items(source)
        return
    if source is None:
        raise InputError("compare: name a preset or a YAML file (silotune compare --list has the papers' tables)")
    where = workers_of(engine, workers, address)
    judging = [f"against={against}"] * bool(against) + ([] if margin is None else [f"margin={margin}"])
    from silotune.lab.comparison import read_comparison

    if out is None and not dry_run:
        raise InputError("--out: is missing; compare needs a folder for its runs")
    comparison = read_comparison(source, [*(words or []), *judging], variant or [], ablation, only or [])
    if out is None or dry_run:
        _preview(comparison.cells)
        return
    from silotune.lab.compare import run_comparison
    from silotune.runs.scores import average_text

    def describe(summary: dict[str, Any]) -> str:
        return f"test {average_text(summary)} ({summary['seconds']:.0f} s)"

    tell = say_aside if as_json else say
    with _listener(quiet, verbose, log_file, describe, tell) as listener:
        away = elsewhere_of(federation, where, out, tell)
        finished = run_comparison(comparison, out, resume, where, listener, away)
    if as_json:
        typer.echo(json.dumps(finished.as_json(), indent=1))
    else:
        _show(finished)


@contextmanager
def _listener(
    quiet: bool,
    verbose: bool,
    log_file: Path | None,
    describe: Callable[[dict[str, Any]], str],
    tell: Callable[[str], None] = say,
) -> Iterator[Listener]:
    """Show the progress of runs, and a line after each: its result, how many are done, and the time left."""
    from silotune.cli.progress import show_progress
    from silotune.lab.runner import Listener
    from silotune.runs.callbacks.display import TimeLeft

    ended, number, time_left = 0, 0, TimeLeft(0)

    def begin(cells: int) -> None:
        nonlocal number, time_left
        number, time_left = cells, TimeLeft(cells)
        time_left.start(1)

    def done(cell: Cell, summary: dict[str, Any]) -> None:
        nonlocal ended
        ended += 1
        followers.clear()
        estimate = time_left.after(ended)
        count = (f"; {ended} of {number}" if ended <= number else "") + (f", {estimate}" if estimate else "")
        tell(f"{cell.folder}: {describe(summary)}{count}")

    with show_progress(quiet, verbose, log_file, write=tell) as followers:
        yield Listener(followers, begin, done, tell)


def _preview(cells: Sequence[Cell]) -> None:
    from silotune.cli.preview import END
    from silotune.lab.runner import built_entries
    from silotune.runs.summary import parameters

    table = new_table(None, ("entry", "seeds"), ("rounds", "silos", "trained parameters", "sent a round"))
    for first, federation in built_entries(cells):
        sizes = parameters(federation)
        counts = (federation.rounds, len(federation.silos), sizes["trainable_parameters"], sizes["sent_parameters"])
        seeds = ", ".join(str(cell.seed) for cell in cells if cell.entry == first.entry)
        table.add_row(first.entry, seeds, *(f"{count:,}" for count in counts))
    console.print(table)
    say(f"{len(cells)} runs; {END}")


def read_papers() -> dict[str, Any]:
    """Return `presets/papers.yaml`: paper → its title, and its tables and figures with the commands that make them."""
    from silotune.core.files import load_yaml

    return dict(load_yaml((resources.files("silotune") / "presets" / "papers.yaml").read_text(encoding="utf-8")))


def _list_items(paper: str | None) -> None:
    """Print the papers' items and their commands; `paper` is the id of one paper, or None."""
    papers = read_papers()
    if paper is not None and paper not in papers:
        raise unknown_name_error("paper", paper, papers)
    for name, entry in papers.items():
        if paper in (None, name):
            say(f"\n{entry['title']} ({name})")
            for item, about in entry["items"].items():
                say(f"  {item}: {about['shows']}")
                for command in about["commands"]:
                    say(f"      {command}")


def _show(finished: ComparisonResult) -> None:
    from silotune.lab.report.significance import beaten_by_words
    from silotune.lab.report.table_files import as_terminal
    from silotune.lab.report.tables import cost_table, score_table

    console.print(as_terminal(score_table(finished.results)))
    console.print(as_terminal(cost_table(finished.results)))
    for sentence in beaten_by_words(finished.results):
        say(sentence)
    show_verdicts(finished.results)
    say(f"wrote {', '.join(map(str, finished.files))}")


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
    out: Annotated[Path, typer.Option(help="Where trials, sweep.csv and best.yaml go.")],
    words: SweepWords = None,
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
    from silotune.lab.comparison import sweep_remarks
    from silotune.lab.report.table_files import as_terminal
    from silotune.lab.sweep import sweep as run_all

    def describe(summary: dict[str, Any]) -> str:
        return str(summary["reason"]) if summary["validation"] is None else f"{summary['validation']:.2f}"

    with _listener(quiet, verbose, log_file, describe) as listener:
        finished = run_all(
            source,
            *(words or []),
            out=out,
            trials=trials,
            resume=resume,
            workers=where,
            progress=listener,
            elsewhere=elsewhere_of(federation, where, out, say),
        )
    console.print(as_terminal(finished.table()))
    for remark in sweep_remarks(out, list(finished.plan.spaces)):
        say(remark)
    say(f"wrote {', '.join(map(str, finished.files))}; silotune compare {source} best={out} … takes each method's best")
