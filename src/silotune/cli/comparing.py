"""`silotune compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silotune.cli.main import app
from silotune.cli.running import console, progress_bars, say
from silotune.errors import OR_RESUME, InputError, require_unused

if TYPE_CHECKING:
    from silotune.comparison import Comparison

Words = Annotated[
    list[str] | None,
    typer.Argument(help="methods=a,b seeds=1,2 std.ddof=1 and any key=value of a run", metavar="[KEY=VALUE]…"),
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
    from silotune.comparison import Cell, read_comparison, run_cells

    if out is None:
        raise InputError("--out: is missing; compare needs a folder for its runs")
    if not resume:
        require_unused(out, "--out", OR_RESUME)
    found = read_comparison(source, words or [], variant or [], ablation)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be made ({error.strerror})") from error
    found.write(out)

    with progress_bars() as bars:

        def done(cell: Cell, summary: dict[str, Any]) -> None:
            for task in bars.progress.task_ids:
                bars.progress.remove_task(task)
            say(f"{cell.folder}: {summary['average']:.2f} ({summary['seconds']:.0f} s)")

        run_cells(found.cells, out, workers=workers, bars=bars, done=done)
    _show(found, out)


def _show(found: Comparison, out: Path) -> None:
    from silotune.report.collect import Entry, read_run
    from silotune.report.exports import write_tables
    from silotune.report.grids import cost_grid, score_grid, terminal
    from silotune.report.page import write_report
    from silotune.report.significance import NOTE, paired

    cells = {row: [cell for cell in found.cells if cell.row == row] for row in found.rows}
    entries = [Entry(row, tuple(read_run(out / cell.folder) for cell in own)) for row, own in cells.items()]
    ddof = found.ddof
    console.print(terminal(score_grid(entries, ddof), console.width))
    console.print(terminal(cost_grid(entries), console.width))
    for pair in (pairs := paired(entries)):
        say(f"{pair.best} − {pair.other}: {pair.difference:+.2f} points, p = {pair.p:.3g} ({pair.pairs} pairs)")
    if pairs:
        say(NOTE)
    written = [*write_tables(entries, out, ddof), write_report(entries, out / "report.html", ddof=ddof)]
    say(f"wrote {', '.join(str(path) for path in written)}")
