"""The command `silotune import-data`: published data sets (FedDPA's, GLUE, IMDB, …) as folders of `data.path`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silotune.cli.console import say
from silotune.errors import unknown_name_error


def import_data(
    kind: Annotated[str, typer.Argument(help="feddpa, glue, imdb, offenseval, enron or lingspam.", metavar="KIND")],
    source: Annotated[Path, typer.Argument(help="The folder as it was downloaded and unpacked.", metavar="SOURCE")],
    to: Annotated[Path, typer.Option("--to", help="The folder for data.path; other tasks in it stay.")],
) -> None:
    """Convert a data set as its authors distribute it into folders of tasks for data.path."""
    from silotune.lab.published import PUBLISHED, read_published, write_tasks

    if kind not in PUBLISHED:
        raise unknown_name_error("kind of data", kind, PUBLISHED)
    tasks = read_published(kind, source)
    write_tasks(tasks, to)
    for task in tasks:
        rows = ", ".join(f"{len(found):,} {split}" for split, found in task.splits.items())
        short = f"; {task.left_out} lines that lack columns are left out" if task.left_out else ""
        say(f"{to / task.name}: {rows}{short}")
    say(f"use it with data.path={to}")
