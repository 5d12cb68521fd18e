"""The commands `silotune report` and `personalization`, over finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silotune.cli.console import console, say


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of compare.", metavar="RUN…")],
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
    ddof: Annotated[int, typer.Option(min=0, max=1, help="Divisor n − ddof of the standard deviation over seeds.")] = 1,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "",
) -> None:
    """Write one self-contained HTML page about finished runs; figures also as PNG and SVG beside it."""
    from silotune.lab.compare import report as write
    from silotune.lab.report.significance import beaten_by_words
    from silotune.lab.report.table_files import as_terminal
    from silotune.lab.report.tables import score_table

    written = write(runs, out, ddof=ddof, title=title)
    console.print(as_terminal(score_table(written.results), console.width))
    for sentence in beaten_by_words(written.results):
        say(sentence)
    say(f"wrote {written.path}")


def personalization(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of compare.", metavar="RUN…")],
    out: Annotated[Path, typer.Option(help="A new or empty folder for tables and figures.")],
    ddof: Annotated[int, typer.Option(min=0, max=1, help="Divisor n − ddof of the standard deviation over seeds.")] = 1,
) -> None:
    """Tables and figures of FedDPA's personalization measures; the runs need evaluation.test_time=true."""
    from silotune.core.files import make_folder
    from silotune.errors import require_unused
    from silotune.lab.personalization import measure_tables, rounds_figure, silo_task_heatmap, unseen_table
    from silotune.lab.report.entries import read_entries
    from silotune.lab.report.frame import Results
    from silotune.lab.report.table_files import as_markdown, as_terminal

    require_unused(out, "--out")
    results = Results(read_entries(runs), ddof)
    unseen = unseen_table(results)
    result_tables = [*measure_tables(results), *([unseen] if unseen else [])]
    for table in result_tables:
        console.print(as_terminal(table, console.width))
    make_folder(out, f"--out {out}")
    text = "\n".join(f"## {table.title}\n\n{as_markdown(table)}" for table in result_tables)
    (out / "tables.md").write_text(text, encoding="utf-8")
    silo_task_heatmap(results.entries, out / "silo-task.png")
    rounds_figure(results.entries, out / "rounds.png")
    say(f"wrote {out}: tables.md and figures")
