"""Options and printing of verdicts, which `silotune compare` and `report` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from silotune.cli.console import console, say

if TYPE_CHECKING:
    from silotune.lab.report.frame import Results

AgainstOption = Annotated[
    str, typer.Option(help="The entry that the others are judged against; by default `local`, or the first.")
]

MarginOption = Annotated[
    float | None, typer.Option(min=0, help="A smaller difference, in points, does not matter; 1 by default.")
]


def show_verdicts(results: Results) -> None:
    """Print the table of verdicts with the rule in words; nothing where there is nothing to compare."""
    from silotune.lab.report.alarms import alarms
    from silotune.lab.report.judging import NOTE, verdict_table
    from silotune.lab.report.table_files import as_terminal

    if (judged := verdict_table(results)) is not None:
        console.print(as_terminal(judged))
        say(NOTE)
    for line in alarms(results):
        say(f"alarm: {line}")
