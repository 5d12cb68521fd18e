"""The typer application of `silotune`, and how it finds its commands; suggests names for unknown ones."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Annotated

import click
import typer
from typer.core import TyperGroup
from typing_extensions import override

from silotune.errors import unknown_name_error

TRAIN = "Train and compare"
BEFORE = "Before a run"
RESULTS = "Results and models"
FEDERATION = "A federation on several machines"
"""The groups of commands in the help."""

_MODULES = {
    "run": "run",
    "watch": "run",
    "methods": "catalog",
    "presets": "catalog",
    "parts": "catalog",
    "init": "catalog",
    "data": "data",
    "config": "config",
    "cost": "cost",
    "privacy": "privacy",
    "evaluate": "evaluate",
    "predict": "predict",
    "redact": "redact",
    "export": "export",
    "import": "export",
    "push": "export",
    "chat": "chat",
}
"""Command → the module of `silotune.cli` that registers it with `app` when it is imported, in the order of the help.
The module is imported when the command is named; torch and other slow libraries are imported inside commands only."""

_GROUP = "silotune.commands"
"""The entry point group of further commands; each entry is a function that adds its commands to `app`."""

_OWN = {room: f"silotune.{room}.commands:add_commands" for room in ("lab", "deploy", "serve")}
"""Entries of this package: they are found without an installation, too."""


class _Commands(TyperGroup):
    """The commands, imported when they are named; an unknown one is answered with the available ones."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of their groups."""
        add_commands()
        self._take_added()
        order, own = {TRAIN: 0, BEFORE: 1, RESULTS: 2, FEDERATION: 3}, [*_MODULES]
        panels = {name: getattr(command, "rich_help_panel", None) for name, command in self.commands.items()}
        names = sorted(super().list_commands(ctx), key=lambda name: own.index(name) if name in own else len(own))
        return sorted(names, key=lambda name: order.get(str(panels[name]), len(order)))

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands:
            add_command(cmd_name)
            self._take_added()
        return super().get_command(ctx, cmd_name)

    def _take_added(self) -> None:
        """Take the commands that `app` has by now."""
        if len(self.commands) < len(app.registered_commands) + len(app.registered_groups):
            group = typer.main.get_group(app)
            self.commands = {**group.commands, **self.commands}

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None:
            raise unknown_name_error("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    name="silotune",
    help="Federated parameter-efficient fine-tuning of language models across data silos.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False) -> None:
    if version:
        from silotune.version import __version__

        typer.echo(__version__)
        raise typer.Exit


def add_command(name: str) -> None:
    """Import the module of a command; of one that is not of this room, all modules."""
    if name in _MODULES:
        import_module(f"silotune.cli.{_MODULES[name]}")
    else:
        add_commands()


@cache
def add_commands() -> None:
    """Import the modules of all commands, those of plug-ins too; calls after the first do nothing."""
    for name in _MODULES:
        add_command(name)
    from importlib.metadata import EntryPoint, entry_points

    entries = _OWN | {entry.name: entry.value for entry in entry_points(group=_GROUP)}
    for name, value in entries.items():
        EntryPoint(name, value, _GROUP).load()(app)
