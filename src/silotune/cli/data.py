"""The command `silotune data`: a setting's silos and rows; with `--show`, what a row becomes, token by token."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from silotune.cli.app import app
from silotune.cli.catalog import JsonOption
from silotune.cli.console import Overrides, console, say
from silotune.errors import unknown_name_error

if TYPE_CHECKING:
    from silotune.config import Config
    from silotune.data.tasks import SiloData
    from silotune.runs.build.shown_rows import ShownRow


@app.command()
def data(
    source: Annotated[str, typer.Argument(help="A preset or a YAML file.", metavar="PRESET_OR_YAML")],
    overrides: Overrides = None,
    show: Annotated[int, typer.Option(min=0, max=1000, help="Show this many training rows of each silo.")] = 0,
    silo: Annotated[str | None, typer.Option(help="Only this silo.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the silos' rows: how many, in which format, and with --show what a row becomes, token by token.

    A row is tokenized as in training: by the backbone's tokenizer, with the head's template, and cut to
    train.max_length. Tokens that the loss counts are marked.
    """
    from silotune.data.loading import load_silos
    from silotune.runs.build.resolve import read_config
    from silotune.runs.build.shown_rows import describe_silo

    config = read_config(source, overrides or [])
    silos = {item.name: item for item in load_silos(config)}
    if silo is not None and silo not in silos:
        raise unknown_name_error("silo", silo, silos)
    chosen = [item for name, item in silos.items() if silo in (None, name)]
    described: dict[str, Any] = {item.name: describe_silo(item) for item in chosen}
    shown = _shown(config, list(silos.values()), chosen, show) if show else {}
    if as_json:
        for name, rows in shown.items():
            described[name]["shown"] = [asdict(row) for row in rows]
        typer.echo(json.dumps({"silos": described}, indent=1, ensure_ascii=False))
        return
    table = Table(title=f"{len(described)} silos")
    for column in ("silo", "task", "format", "metric"):
        table.add_column(column)
    for column in ("train", "validation", "test"):
        table.add_column(column, justify="right")
    for name, entry in described.items():
        counts = (f"{number:,}" for number in entry["rows"].values())
        table.add_row(name, entry["task"], entry["format"], entry["metric"], *counts)
    console.print(table)
    for name, rows in shown.items():
        for number, row in enumerate(rows, start=1):
            _print_row(name, number, row)


def _shown(config: Config, silos: list[SiloData], chosen: list[SiloData], number: int) -> dict[str, list[ShownRow]]:
    """Tokenize rows of the chosen silos, with the template that all silos' rows need."""
    from silotune.runs.build.model import build_model
    from silotune.runs.build.resolve import make_method, use_this_machine, with_chat_template
    from silotune.runs.build.shown_rows import show_rows
    from silotune.runs.build.validation import check_tasks

    config = use_this_machine(config)
    method = make_method(with_chat_template(config, silos))
    head, tasks = method.setting.head, {item.name: item.task for item in silos}
    head.check_names(tasks.values())
    check_tasks(config, method, tasks)
    backbone = build_model(config, method, tasks.values()).backbone
    tokenize = head.row_tokenizer(backbone, config.train.max_length)
    return {item.name: show_rows(backbone.tokenizer, tokenize, item, number) for item in chosen}


def _print_row(silo: str, number: int, row: ShownRow) -> None:
    say(f"\nsilo {silo}, training row {number}")
    for text in row.texts:
        say(f"  {text}")
    trained = sum(token.trained for token in row.tokens)
    say(f"  → {row.target}")
    say(f"  {len(row.tokens)} tokens, {trained} of them trained")
    say(f"  {'':>5} {'id':>7}  {'input':<8} {'trained':<8} token")
    for place, token in enumerate(row.tokens):
        mark = "yes" if token.trained else ""
        say(f"  {place:>5} {token.id:>7}  {token.input:<8} {mark:<8} {token.text!r}")
