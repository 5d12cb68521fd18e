"""The commands `silotune worker` and `silotune federation …`: federations over several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silotune.cli.app import app

WorkerFile = Annotated[Path, typer.Argument(help="The silo's own configuration (YAML).", metavar="SILO_YAML")]


@app.command()
def worker(silo: WorkerFile) -> None:
    """Serve one silo: load its backbone and rows, and train for the SuperNode on the same machine."""
    from silotune.distributed.silo.silo_config import read_silo_settings
    from silotune.distributed.silo.worker import serve

    serve(read_silo_settings(silo))


federation = typer.Typer(help="A federation on several machines.", no_args_is_help=True)

app.add_typer(federation, name="federation")

SiloFile = Annotated[Path, typer.Argument(help="The silo's own file, or its node's (YAML).", metavar="SILO_YAML")]

SiloName = Annotated[str, typer.Argument(help="The silo's name.")]

CoordinatorFile = Annotated[Path, typer.Argument(help="The coordinator's file (YAML).", metavar="COORDINATOR_YAML")]

PartyFile = Annotated[Path, typer.Argument(help="The coordinator's or a silo's file (YAML).", metavar="YAML")]


@federation.command()
def up(coordinator: CoordinatorFile) -> None:
    """Run the coordinator's SuperLink, in the foreground."""
    from silotune.cli.console import say
    from silotune.distributed.deploy import commands
    from silotune.distributed.deploy.party_configs import read_coordinator_settings

    commands.up(read_coordinator_settings(coordinator), say)


@federation.command()
def admit(
    coordinator: CoordinatorFile, silo: SiloName, key: Annotated[Path, typer.Argument(help="Its public key (….pub).")]
) -> None:
    """Register a silo's public key."""
    from silotune.cli.console import say
    from silotune.distributed.deploy import node_keys
    from silotune.distributed.deploy.party_configs import read_coordinator_settings

    node = node_keys.register_node(read_coordinator_settings(coordinator), silo, key)
    say(f"silo {silo!r} is node {node}")


@federation.command()
def expel(coordinator: CoordinatorFile, silo: SiloName) -> None:
    """Remove a silo's public key: the silo left, or its key was lost and will be replaced."""
    from silotune.cli.console import say
    from silotune.distributed.deploy import node_keys
    from silotune.distributed.deploy.party_configs import read_coordinator_settings

    node = node_keys.unregister_node(read_coordinator_settings(coordinator), silo)
    say(f"silo {silo!r} was node {node}, and is it no more")


@federation.command()
def join(silo: SiloFile) -> None:
    """Run a silo's worker and SuperNode, in the foreground."""
    from silotune.cli.console import say
    from silotune.distributed.deploy import commands
    from silotune.distributed.deploy.party_configs import read_silo_or_node_settings

    commands.join(silo, read_silo_or_node_settings(silo), say)


@federation.command()
def start(
    coordinator: CoordinatorFile,
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
def status(file: PartyFile) -> None:
    """Show the running processes."""
    from silotune.cli.console import say
    from silotune.distributed.deploy import commands

    for line in commands.status(file):
        say(line)


@federation.command()
def down(file: PartyFile) -> None:
    """Stop the processes that `up` or `join` started."""
    from silotune.cli.console import say
    from silotune.distributed.deploy import commands

    say("ended" if commands.down(file) else "nothing was running")
