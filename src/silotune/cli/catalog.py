"""The commands that list what there is (`methods`, `presets`, `parts`), and `init`, which writes an example."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from silotune.cli.app import BEFORE, app
from silotune.cli.console import JsonOption, Overrides, console, new_table, say
from silotune.errors import require_unused


@app.command(rich_help_panel=BEFORE)
def methods(
    as_json: JsonOption = False, cite: Annotated[bool, typer.Option(help="Print the papers as BibTeX instead.")] = False
) -> None:
    """List the methods, their papers and options."""
    from silotune.methods import METHODS

    if cite:
        names: dict[str, list[str]] = {}
        for name, method in METHODS.items():
            names.setdefault(method.paper, []).append(name)
        typer.echo("\n".join(entry for paper, of_paper in names.items() if (entry := _bibtex(of_paper, paper))))
        return
    rows = []
    for name, method in METHODS.items():
        options = {key: field.default for key, field in method.Options.model_fields.items()}
        rows.append({"method": name, "paper": method.paper, "options": options})
    _show(rows, as_json, "methods")


def _bibtex(methods: Sequence[str], paper: str) -> str:
    """Return the entry of a paper, "AUTHORS YEAR, TITLE"; empty for a baseline, which has none."""
    match = re.fullmatch(r"(.+?) (\d{4}), (.+)", paper)
    if match is None:
        return ""
    authors = match[1].replace(" et al.", " and others").replace(", ", " and ")
    fields = {"author": authors, "title": f"{{{match[3]}}}", "year": match[2], "note": f"method {', '.join(methods)}"}
    lines = [f"  {key} = {{{value}}}," for key, value in fields.items()]
    return "\n".join([f"@misc{{{methods[0]},", *lines, "}"])


@app.command(rich_help_panel=BEFORE)
def presets(as_json: JsonOption = False) -> None:
    """List the presets (settings)."""
    from silotune.config import preset_names, preset_tree

    rows = []
    for name in preset_names():
        tree = preset_tree(name)
        rows.append({"preset": name, "description": tree["description"], "method": tree["method"]["name"]})
    _show(rows, as_json, "presets")


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
    title, numbers = f"{method} on {described['backbone']}", ("tensors", "parameters", "bytes")
    table = new_table(title, ("part", "module", "scope"), numbers)
    for part in described["parts"]:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in part.values()))
    console.print(table)
    for tuned in described["tuned"]:
        say(f"tuned: {tuned['number']} × {tuned['modules']}, {tuned['percent']:.1f} % of the backbone's weights")
    say(described["leaves"])
    if described["comes_down"]:
        say(described["comes_down"])


@app.command(rich_help_panel=BEFORE)
def init(directory: Annotated[Path, typer.Argument(metavar="DIR")]) -> None:
    """Write a commented, runnable example of a federation of your own silos."""
    from silotune.core.files import make_folder
    from silotune.models.tuners import TUNERS

    require_unused(directory)
    make_folder(directory, str(directory))
    _csv("sentiment", directory / "reviews.csv", ["review", "opinion"])
    _csv("duplicate_question", directory / "support.csv", ["first_question", "second_question", "relation"])
    path = directory / "federation.yaml"
    tuners = ", ".join(name for name in TUNERS if name != "bottleneck")
    example = (resources.files("silotune") / "cli" / "example.yaml").read_text(encoding="utf-8")
    path.write_text(example.format(name=path, tuners=tuners), encoding="utf-8")
    say(f"wrote {path}; run it with: silotune run {path}")


def _show(rows: list[dict[str, Any]], as_json: bool, title: str) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    table = new_table(title, rows[0])
    for row in rows:
        cells = (
            ", ".join(f"{k}={v}" for k, v in cell.items()) if isinstance(cell, dict) else cell for cell in row.values()
        )
        table.add_row(*cells)
    console.print(table)


def _csv(task: str, path: Path, columns: list[str]) -> None:
    """Write the demo's training rows of a task as CSV."""
    from silotune.data.loading import demo_folder

    folder = demo_folder() / task
    names = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["label_names"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            texts = [row[column] for column in ("sentence1", "sentence2") if column in row]
            writer.writerow([*texts, names[row["label"]]])
