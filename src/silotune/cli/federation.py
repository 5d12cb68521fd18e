"""`silotune worker` and `silotune federation …`: a federation over real machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silotune.cli.app import app

SiloFile = Annotated[Path, typer.Argument(help="The silo's own configuration (YAML).", metavar="SILO_YAML")]


@app.command()
def worker(silo: SiloFile) -> None:
    """Hold a silo's backbone and rows, and do its work for the SuperNode beside it."""
    from silotune.distributed.silo.silo_config import read_silo_settings
    from silotune.distributed.silo.worker import serve

    serve(read_silo_settings(silo))


federation = typer.Typer(help="A federation on several machines.", no_args_is_help=True)

app.add_typer(federation, name="federation")

JoinFile = Annotated[Path, typer.Argument(help="The silo's own file, or its node's (YAML).", metavar="SILO_YAML")]

SiloName = Annotated[str, typer.Argument(help="The silo's name.")]

LinkFile = Annotated[Path, typer.Argument(help="The coordinator's file (YAML).", metavar="COORDINATOR_YAML")]

AnyFile = Annotated[Path, typer.Argument(help="The coordinator's or a silo's file (YAML).", metavar="YAML")]


@federation.command()
def up(coordinator: LinkFile) -> None:
    """Run the coordinator's SuperLink, in the foreground."""
    from silotune.cli.console import say
    from silotune.distributed.deploy import commands
    from silotune.distributed.deploy.party_configs import read_coordinator_settings

    commands.up(read_coordinator_settings(coordinator), say)


@federation.command()
def admit(
    coordinator: LinkFile, silo: SiloName, key: Annotated[Path, typer.Argument(help="Its public key (….pub).")]
) -> None:
    """Let a silo's key in."""
    from silotune.cli.console import say
    from silotune.distributed.deploy import node_keys
    from silotune.distributed.deploy.party_configs import read_coordinator_settings

    node = node_keys.register_node(read_coordinator_settings(coordinator), silo, key)
    say(f"silo {silo!r} is node {node}")


@federation.command()
def expel(coordinator: LinkFile, silo: SiloName) -> None:
    """Take a silo's key out: it left, or its key is lost and another one comes."""
    from silotune.cli.console import say
    from silotune.distributed.deploy import node_keys
    from silotune.distributed.deploy.party_configs import read_coordinator_settings

    node = node_keys.unregister_node(read_coordinator_settings(coordinator), silo)
    say(f"silo {silo!r} was node {node}, and is it no more")


@federation.command()
def join(silo: JoinFile) -> None:
    """Run a silo's worker and SuperNode, in the foreground."""
    from silotune.cli.console import say
    from silotune.distributed.deploy import commands
    from silotune.distributed.deploy.party_configs import read_silo_or_node_settings

    commands.join(silo, read_silo_or_node_settings(silo), say)


@federation.command()
def start(
    coordinator: LinkFile,
    source: Annotated[str, typer.Argument(help="A preset or a YAML file.", metavar="PRESET_OR_YAML")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value …", metavar="[KEY=VALUE]…")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder, on this machine.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    wait: Annotated[bool, typer.Option(help="Follow the run until it ends.")] = True,
) -> None:
    """Start a run with the silos that `federation.silos` names."""
    from silotune.cli.console import console, default_folder, progress_bars, say
    from silotune.distributed.coordinator.coordinate import prepare
    from silotune.distributed.deploy import commands
    from silotune.distributed.deploy.party_configs import read_coordinator_settings
    from silotune.experiments.report.result_table import result_table
    from silotune.runs.build.resolve import read_config
    from silotune.runs.storage.readers import read_summary

    settings = read_coordinator_settings(coordinator)
    config = read_config(source, overrides or [])
    folder = (out or default_folder(source, config)).resolve()
    job = prepare(config, folder, resume)
    say(f"run {commands.start(settings, job)} in {folder}")
    if not wait:
        return
    with progress_bars() as bars:
        commands.follow(folder, bars(config.method.name, config.rounds), say)
    console.print(result_table([read_summary(folder)]))


@federation.command()
def status(file: AnyFile) -> None:
    """Say what runs."""
    from silotune.cli.console import say
    from silotune.distributed.deploy import commands

    for line in commands.status(file):
        say(line)


@federation.command()
def down(file: AnyFile) -> None:
    """End what `up` or `join` runs."""
    from silotune.cli.console import say
    from silotune.distributed.deploy import commands

    say("ended" if commands.down(file) else "nothing was running")
