"""The command `silotune partition`: rows per silo and label of a setting, before any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from silotune.cli.app import app
from silotune.cli.console import JsonOption, Overrides, console, say
from silotune.errors import InputError


@app.command()
def partition(
    source: Annotated[str, typer.Argument(help="A preset or a YAML file.", metavar="PRESET_OR_YAML")],
    overrides: Overrides = None,
    as_json: JsonOption = False,
    out: Annotated[Path | None, typer.Option(help="Write a heatmap of silo × label as PNG.", metavar="PNG")] = None,
) -> None:
    """Show how a setting's data set is divided among silos."""
    from silotune.data.loading import load_silos
    from silotune.experiments.report.partition_heatmap import label_counts, partition_figure
    from silotune.runs.build.resolve import read_config

    config = read_config(source, overrides or [])
    if config.partition.name == "none":
        raise InputError(
            "partition: this setting's silos are given, nothing is divided; choose one, e.g. partition=dirichlet "
            "(allowed: iid, dirichlet, quantity, shards, column)"
        )
    if out is not None and (out.suffix.lower() != ".png" or not out.parent.is_dir()):
        raise InputError(f"--out {out}: must be a .png file in a folder that exists")
    silos = load_silos(config)
    counts = label_counts(silos)
    labels = list(silos[0].task.labels) or ["rows"]
    if out is not None:
        partition_figure(counts, labels, out)
    held_out = silos[0].splits.counts()
    described = {
        "partition": config.partition.model_dump(mode="json"),
        "rows": sum(map(sum, counts.values())),
        "labels": labels,
        "silos": {
            name: {"rows": sum(row), "labels": dict(zip(labels, row, strict=True))} for name, row in counts.items()
        },
        "validation": held_out["validation"],
        "test": held_out["test"],
    }
    if as_json:
        typer.echo(json.dumps(described, indent=1))
        return
    table = Table(title=f"{config.partition.name}: {described['rows']:,} training rows in {len(counts)} silos")
    table.add_column("silo")
    for column in (*labels, "rows"):
        table.add_column(column, justify="right")
    for name, row in counts.items():
        table.add_row(name, *(f"{number:,}" for number in (*row, sum(row))))
    table.add_section()
    totals = [sum(column) for column in zip(*counts.values(), strict=True)]
    table.add_row("all", *(f"{number:,}" for number in (*totals, sum(totals))))
    console.print(table)
    say(f"for all silos together: {held_out['validation']:,} validation and {held_out['test']:,} test rows")
    if out is not None:
        say(f"heatmap: {out}")
