"""Adds the commands of federations over several machines to `silotune`."""

from __future__ import annotations

import typer

from silotune.cli.app import FEDERATION
from silotune.deploy import federation_commands, setup_commands, silo_commands  # noqa: F401 (the second adds to both)


def add_commands(app: typer.Typer) -> None:
    """Add `worker`, `federation …` and `silo …` to the application."""
    app.command(rich_help_panel=FEDERATION)(federation_commands.worker)
    app.add_typer(federation_commands.federation, name="federation", rich_help_panel=FEDERATION)
    app.add_typer(silo_commands.silo, name="silo", rich_help_panel=FEDERATION)
