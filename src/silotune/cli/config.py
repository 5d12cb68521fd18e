"""The command `silotune config`, which explains the keys of a configuration."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from silotune.cli.app import BEFORE, app
from silotune.cli.console import JsonOption, WholeTable, complete_key, console, new_table, say

if TYPE_CHECKING:
    from silotune.config.reference import Key


@app.command("config", rich_help_panel=BEFORE)
def config_command(
    key: Annotated[
        str | None,
        typer.Argument(help="A section or a key, e.g. train or train.lr.", metavar="KEY", autocompletion=complete_key),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the JSON schema of configuration files, for editors.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Explain keys of the configuration: what they take, their default, what they do."""
    from silotune.config.reference import PAGE, all_keys, json_schema, keys_of, sections
    from silotune.errors import unknown_name_error

    if schema:
        typer.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))
        return
    named = sections()
    if key is None:
        keys = keys_of("")
    elif key in named:
        keys = keys_of(key)
    else:
        keys = [one for section in named for one in keys_of(section) if one.name == key]
        if not keys:
            every = all_keys()
            raise unknown_name_error("key", key, [*filter(None, named)], "section.key", elsewhere=every)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in keys], indent=1, ensure_ascii=False))
        return
    if key is not None and key not in named:
        for one in keys:
            say(f"{one.name}: {_plain(one.meaning)}")
            say(f"  allowed: {_plain(one.type)}")
            say(f"  default: {_plain(one.default)}")
            if one.owners:
                say(f"  of: {', '.join(one.owners)}")
        say(f"documented in {PAGE}")
        return
    if key is None:
        table = new_table("sections; silotune config SECTION shows their keys", ("section", "about"))
        for name, meaning in named.items():
            if name:
                table.add_row(name, escape(_plain(meaning)))
        console.print(table)
    console.print(_keys_table(key or "keys without a section", keys))


def _keys_table(title: str, keys: list[Key]) -> WholeTable:
    table = new_table(title, ("key", "allowed", "default", "meaning"))
    for one in keys:
        owners = f" (of {', '.join(one.owners[:3])}{' …' if len(one.owners) > 3 else ''})" if one.owners else ""
        table.add_row(*map(escape, map(_plain, (one.name, one.type, one.default, one.meaning + owners))))
    return table


def _plain(text: str) -> str:
    return text.replace("`", "")
