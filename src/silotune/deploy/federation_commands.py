"""The commands `silotune worker` and `silotune federation …`; those that set one up are in `setup_commands.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silotune.cli.console import JsonOption, Overrides, console, say
from silotune.core.clock import log_line

if TYPE_CHECKING:
    from silotune.deploy.party_configs import CoordinatorSettings
    from silotune.deploy.run_queue import QueuedRun

WorkerFile = Annotated[Path, typer.Argument(help="The silo's own configuration (YAML).", metavar="SILO_YAML")]


def worker(silo: WorkerFile) -> None:
    """Serve one silo: load its backbone and rows, and train for the SuperNode on the same machine."""
    from silotune.distributed.silo.silo_config import read_silo_settings
    from silotune.distributed.silo.worker import serve

    serve(read_silo_settings(silo))


federation = typer.Typer(help="A federation on several machines.", no_args_is_help=True)

SiloFile = Annotated[Path, typer.Argument(help="The silo's own file, or its node's (YAML).", metavar="SILO_YAML")]

SiloName = Annotated[str, typer.Argument(help="The silo's name.")]

CoordinatorFile = Annotated[Path, typer.Argument(help="The coordinator's file (YAML).", metavar="COORDINATOR_YAML")]

RunNumber = Annotated[int, typer.Argument(help="The run's number, as `federation runs` lists it.", metavar="RUN")]

PartyFile = Annotated[Path, typer.Argument(help="The coordinator's or a silo's file (YAML).", metavar="YAML")]


@federation.command()
def up(coordinator: CoordinatorFile) -> None:
    """Run the coordinator's SuperLink, in the foreground."""
    from silotune.deploy import party_processes as commands
    from silotune.deploy.enrollment import enrollment
    from silotune.deploy.party_configs import read_coordinator_settings
    from silotune.deploy.status_server import status_server

    settings = read_coordinator_settings(coordinator)
    with enrollment(settings, _log), status_server(settings, _log):
        commands.up(settings, _log)


@federation.command()
def admit(
    coordinator: CoordinatorFile, silo: SiloName, key: Annotated[Path, typer.Argument(help="Its public key (….pub).")]
) -> None:
    """Register a silo's public key."""
    from silotune.deploy import node_keys
    from silotune.deploy.party_configs import read_coordinator_settings

    node = node_keys.register_node(read_coordinator_settings(coordinator), silo, key)
    say(f"silo {silo!r} is node {node}")


@federation.command()
def expel(coordinator: CoordinatorFile, silo: SiloName) -> None:
    """Remove a silo's public key: the silo left, or its key was lost and will be replaced."""
    from silotune.deploy import node_keys
    from silotune.deploy.party_configs import read_coordinator_settings

    node = node_keys.unregister_node(read_coordinator_settings(coordinator), silo)
    say(f"silo {silo!r} was node {node}; its key is removed")


@federation.command()
def join(silo: SiloFile) -> None:
    """Run a silo's worker and SuperNode, in the foreground."""
    from silotune.deploy import party_processes as commands
    from silotune.deploy.party_configs import read_silo_or_node_settings

    commands.join(silo, read_silo_or_node_settings(silo), _log)


@federation.command()
def start(
    coordinator: CoordinatorFile,
    source: Annotated[str, typer.Argument(help="A preset or a YAML file.", metavar="PRESET_OR_YAML")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run folder, on this machine.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    wait: Annotated[bool, typer.Option(help="Follow the run until it ends.")] = True,
) -> None:
    """Start a run with the silos that `federation.silos` names, after those that were started before it."""
    from silotune.deploy import run_commands
    from silotune.deploy.party_configs import read_coordinator_settings
    from silotune.runs.build.resolve import read_config
    from silotune.runs.run import default_folder

    settings = read_coordinator_settings(coordinator)
    config = read_config(source, overrides or [])
    folder = (out or default_folder(source, config)).resolve()
    run = run_commands.start(settings, config, folder, resume)
    say(f"run {run.number} in {folder}")
    if wait:
        _follow(settings, run)


@federation.command()
def runs(coordinator: CoordinatorFile, as_json: JsonOption = False) -> None:
    """List the coordinator's runs: queued, running and over."""
    import json

    from rich.markup import escape
    from rich.table import Table

    from silotune.deploy import run_commands
    from silotune.deploy.party_configs import read_coordinator_settings

    settings = read_coordinator_settings(coordinator)
    listed = run_commands.listed(settings)
    for problem in run_commands.damaged(settings):
        typer.echo(problem, err=True)
    if as_json:
        typer.echo(json.dumps(listed, indent=1))
        return
    table = Table("run", "state", "method", "round", "silos", "began", "folder")
    for run in listed:
        activity = run["activity"] or run["error"]
        state = run["state"] + (f": {activity}" if activity else "")
        cells = (str(run["run"]), state, run["method"], f"{run['round']}/{run['rounds']}", ", ".join(run["silos"]))
        table.add_row(*map(escape, (*cells, run["began"][:19], run["out"])))
    console.print(table)


@federation.command()
def stop(coordinator: CoordinatorFile, run: RunNumber) -> None:
    """Stop a run, or take it out of the queue; its finished rounds are kept."""
    from silotune.deploy import run_commands
    from silotune.deploy.party_configs import read_coordinator_settings

    stopped = run_commands.stop(read_coordinator_settings(coordinator), run)
    say(f"run {run}: {'is being stopped' if stopped.stop else 'stopped'}")


@federation.command()
def resume(
    coordinator: CoordinatorFile,
    run: RunNumber,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="federation.key=value …", metavar="[FEDERATION.KEY=VALUE]…")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Follow the run until it ends.")] = True,
) -> None:
    """Continue a run that failed or was stopped, also with another quorum, other deadlines or other silos."""
    from silotune.deploy import run_commands
    from silotune.deploy.party_configs import read_coordinator_settings

    settings = read_coordinator_settings(coordinator)
    resumed = run_commands.resume(settings, run, overrides or [])
    say(f"run {run} in {resumed.out}")
    if wait:
        _follow(settings, resumed)


def _follow(settings: CoordinatorSettings, run: QueuedRun) -> None:
    """Show a run's progress until it is over, then its results."""
    from silotune.cli.progress import show_progress
    from silotune.cli.result_table import result_table
    from silotune.deploy import run_commands
    from silotune.runs.callbacks.feed import EventFeed
    from silotune.runs.storage.readers import read_summary

    with (
        show_progress() as followers,
        EventFeed(Path(run.out), run.rounds, followers(run.method, run.rounds)) as feed,
    ):
        run_commands.follow(settings, run.number, feed, say)
    console.print(result_table([read_summary(Path(run.out))]))


@federation.command()
def status(file: PartyFile, as_json: JsonOption = False) -> None:
    """Show the state of a coordinator and its silos, or whether a silo's processes run."""
    import json

    from silotune.deploy import party_processes as commands
    from silotune.deploy.federation_status import federation_status
    from silotune.deploy.party_configs import CoordinatorSettings, read_party
    from silotune.deploy.status_table import show_status

    settings = read_party(file)
    if isinstance(settings, CoordinatorSettings):
        state = federation_status(settings)
        if as_json:
            typer.echo(json.dumps(state, indent=1))
        else:
            show_status(state)
    elif as_json:
        typer.echo(json.dumps(commands.silo_status(settings), indent=1))
    else:
        for line in commands.status(file):
            say(line)


@federation.command()
def down(file: PartyFile) -> None:
    """Stop the processes that `up` or `join` started."""
    from silotune.deploy import party_processes as commands

    say("ended" if commands.down(file) else "nothing was running")


@federation.command()
def audit(
    folder: Annotated[Path, typer.Argument(help="A run folder, or the coordinator's folder.", metavar="FOLDER")],
    as_json: JsonOption = False,
) -> None:
    """Check the coordinator's audit log of messages and decisions, and sum it up; exit code 1 if it was changed."""
    from silotune.deploy.print_audit import print_audit
    from silotune.distributed.coordinator.run_registry import FEDERATION_FOLDER

    print_audit(folder / FEDERATION_FOLDER if (folder / FEDERATION_FOLDER).is_dir() else folder, as_json)


def _log(text: str) -> None:
    """Print a line of a process that stays in the foreground, with its time (UTC)."""
    log_line(text, sys.stdout)
