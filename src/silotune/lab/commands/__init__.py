"""The lab's commands, which `silotune` finds by the entry point group `silotune.commands`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line.

    Importing their modules is cheap: each imports torch and other slow libraries inside its command only.
    """
    from silotune.cli.app import BEFORE, RESULTS, TRAIN
    from silotune.lab.commands import compare, demo, partition, report

    groups: dict[str, tuple[Callable[..., None], ...]] = {
        TRAIN: (demo.demo, compare.compare, compare.sweep),
        BEFORE: (partition.partition, partition.import_data),
        RESULTS: (report.report, report.personalization, report.transfer, report.release),
    }
    for group, commands in groups.items():
        for command in commands:
            app.command(rich_help_panel=group)(command)
