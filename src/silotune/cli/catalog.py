"""The commands that list what there is (`methods`, `presets`, `parts`), and `init`, which writes an example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from silotune.cli.app import BEFORE, app
from silotune.cli.console import JsonOption, Overrides, console, say


@app.command(rich_help_panel=BEFORE)
def methods(as_json: JsonOption = False) -> None:
    """List the methods, their papers and options."""
    _show(_list_methods(), as_json, "methods")


@app.command(rich_help_panel=BEFORE)
def presets(as_json: JsonOption = False) -> None:
    """List the presets (settings)."""
    _show(_list_presets(), as_json, "presets")


@app.command(rich_help_panel=BEFORE)
def parts(
    method: Annotated[str, typer.Argument(metavar="METHOD")], overrides: Overrides = None, as_json: JsonOption = False
) -> None:
    """Print a method's parts: tuner, scope, tensors, parameters, bytes, and what leaves a silo.

    Tuner and head are those of the demo's setting by default; heads are counted for one task of two labels.
    """
    from silotune.cost.describe import describe

    described = describe(method, overrides or [])
    if as_json:
        typer.echo(json.dumps(described, indent=1))
        return
    table = Table(title=f"{method} on {described['backbone']}")
    for column in ("part", "module", "scope", "tensors", "parameters", "bytes"):
        table.add_column(column, justify="left" if column in ("part", "module", "scope") else "right")
    for part in described["parts"]:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in part.values()))
    console.print(table)
    say(described["leaves"])
    if described["comes_down"]:
        say(described["comes_down"])


@app.command(rich_help_panel=BEFORE)
def init(directory: Annotated[Path, typer.Argument(metavar="DIR")]) -> None:
    """Write a commented, runnable example of a federation of your own silos."""
    from silotune.cli.init_template import write_example

    written = write_example(directory)
    say(f"wrote {written}; run it with: silotune run {written}")


def _list_presets() -> list[dict[str, Any]]:
    from silotune.config import preset_names, preset_tree

    rows = []
    for name in preset_names():
        tree = preset_tree(name)
        rows.append({"preset": name, "description": tree["description"], "method": tree["method"]["name"]})
    return rows


def _list_methods() -> list[dict[str, Any]]:
    from silotune.methods import METHODS

    return [
        {"method": name, "paper": method.paper, "options": _options(method.Options.model_fields)}
        for name, method in METHODS.items()
    ]


def _options(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: field.default for name, field in fields.items()}


def _show(rows: list[dict[str, Any]], as_json: bool, title: str) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        cells = (
            ", ".join(f"{k}={v}" for k, v in cell.items()) if isinstance(cell, dict) else cell for cell in row.values()
        )
        table.add_row(*cells)
    console.print(table)
