"""The command `silotune partition`: rows per silo and label of a setting, before any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from silotune.cli.console import JsonOption, Overrides, Source, console, say


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
