"""The commands before any training: `silotune partition` and `import-data`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from silotune.cli.console import JsonOption, Overrides, Source, console, say
from silotune.errors import unknown_name_error


def partition(
    source: Source,
    overrides: Overrides = None,
    as_json: JsonOption = False,
    out: Annotated[Path | None, typer.Option(help="Write a heatmap of silo × label as PNG.", metavar="PNG")] = None,
) -> None:
    """Show how a setting's data set is divided among silos."""
    from silotune.lab.partition import checked_picture
    from silotune.lab.partition import partition as divide

    picture = None if out is None else checked_picture(out)
    divided = divide(source, *(overrides or []))
    if picture is not None:
        divided.plot(picture)
    if as_json:
        typer.echo(json.dumps(divided.as_json(), indent=1))
        return
    table = Table(title=divided.title)
    table.add_column("silo")
    for column in (*divided.labels, "rows"):
        table.add_column(column, justify="right")
    for cells in divided.texts():
        table.add_row(*cells)
    table.add_section()
    totals = [sum(column) for column in zip(*divided.counts.values(), strict=True)]
    table.add_row("all", *(f"{number:,}" for number in (*totals, divided.rows)))
    console.print(table)
    say(f"for all silos together: {divided.validation:,} validation and {divided.test:,} test rows")
    if picture is not None:
        say(f"heatmap: {picture}")


def import_data(
    kind: Annotated[str, typer.Argument(help="feddpa or lingspam.", metavar="KIND")],
    source: Annotated[Path, typer.Argument(help="The folder as it was downloaded and unpacked.", metavar="SOURCE")],
    to: Annotated[Path, typer.Option("--to", help="The folder for data.path; other tasks in it stay.")],
) -> None:
    """Convert a data set that the hub lacks, as its authors distribute it, into folders of tasks for data.path."""
    from silotune.lab.published import PUBLISHED, write_tasks

    if kind not in PUBLISHED:
        raise unknown_name_error("kind of data", kind, PUBLISHED)
    tasks = PUBLISHED[kind](source)
    write_tasks(tasks, to)
    for task in tasks:
        rows = ", ".join(f"{len(found):,} {split}" for split, found in task.splits.items())
        say(f"{to / task.name}: {rows}")
    say(f"use it with data.path={to}")
