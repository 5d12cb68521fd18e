"""The commands that list what there is (`methods`, `presets`, `parts`), and `init`, which writes an example."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from silotune.cli.app import BEFORE, app
from silotune.cli.console import JsonOption, Overrides, console, new_table, say
from silotune.errors import require_unused

_EXAMPLE = """\
# A federation of your own silos. Run it with: silotune run {name}
# Any key can also be given on the command line: silotune run {name} method=fedavg rounds=4

method: fedmcp            # silotune methods lists them; silotune parts METHOD says what leaves a silo
rounds: 3
seed: 1

backbone: default         # offline MiniLM (silotune[demo]); or a hub id, or a local folder

tuner:
  name: bottleneck        # also {tuners}
  r: 16

head:
  name: mlp               # mlp or linear; verbalizer and lm read the backbone's own vocabulary
  scope: private          # private: each silo keeps its head; shared: all silos hold one task
  pooling: auto           # as the model was trained: mean (MiniLM), last (causal models), first (the [CLS] token)

train:                    # one silo's training in one round
  lr: 1e-3
  epochs: 1
  batch_size: 16
  # batches: even         # all of nearly one size; silos on machines of their own demand it
  max_length: 64          # tokens; longer rows are cut

silos:                    # paths are relative to this file; formats: .csv .tsv .jsonl .parquet
  - name: reviews         # one file is split 6:2:2 into train, validation and test
    path: reviews.csv
    text: review          # the text column
    label: opinion        # label names are read from this column
  - name: support
    path: support.csv
    text: [first_question, second_question]   # two columns: pairs
    label: relation
    # task: duplicates    # silos of one task share label names (default: the silo's name)
    # labels: [different, duplicate]          # where the file does not show them all
    # metric: f1          # accuracy, f1, macro_f1, balanced_accuracy, mcc, auroc; rouge1 where answers are written
    # positive: duplicate # the label that F1 is about; without it F1 is the mean over all labels
  # a folder with train.csv, validation.csv and test.csv (or other formats) is taken as it is split
"""
"""The configuration that `init` writes."""


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
    found = re.fullmatch(r"(.+?) (\d{4}), (.+)", paper)
    if found is None:
        return ""
    authors = found[1].replace(" et al.", " and others").replace(", ", " and ")
    fields = {"author": authors, "title": f"{{{found[3]}}}", "year": found[2], "note": f"method {', '.join(methods)}"}
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
    path.write_text(_EXAMPLE.format(name=path, tuners=tuners), encoding="utf-8")
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
