"""The commands `silotune worker` and `silotune federation …`; adds them and `silotune silo …` to the application."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silotune.cli.app import FEDERATION
from silotune.cli.console import JsonOption, Overrides, say
from silotune.core.clock import log_line
from silotune.deploy.silo_commands import InstallOption, silo
from silotune.errors import InputError

if TYPE_CHECKING:
    from silotune.config import Config
    from silotune.deploy.queue import QueuedRun
    from silotune.deploy.settings import CoordinatorSettings

federation = typer.Typer(help="A federation on several machines.", no_args_is_help=True)

SiloFile = Annotated[Path, typer.Argument(help="The silo's own file, or its node's (YAML).", metavar="SILO_YAML")]

SiloName = Annotated[str, typer.Argument(help="The silo's name.")]

CoordinatorFile = Annotated[Path, typer.Argument(help="The coordinator's file (YAML).", metavar="COORDINATOR_YAML")]

RunNumber = Annotated[int, typer.Argument(help="The run's number, as `federation runs` lists it.", metavar="RUN")]

WaitOption = Annotated[bool, typer.Option(help="Follow the run until it ends.")]


def add_commands(app: typer.Typer) -> None:
    """Add `worker`, `federation …` and `silo …` to the application."""
    app.command(rich_help_panel=FEDERATION)(worker)
    app.command(rich_help_panel=FEDERATION)(survey)
    app.add_typer(federation, name="federation", rich_help_panel=FEDERATION)
    app.add_typer(silo, name="silo", rich_help_panel=FEDERATION)


def worker(
    silo: Annotated[Path, typer.Argument(help="The silo's own configuration (YAML).", metavar="SILO_YAML")],
) -> None:
    """Serve one silo: load its backbone and rows, and train for the SuperNode on the same machine."""
    from silotune.distributed.silo.silo_config import read_silo_settings
    from silotune.distributed.silo.worker import serve

    serve(read_silo_settings(silo))


def survey(
    coordinator: CoordinatorFile,
    source: Annotated[str, typer.Argument(help="The run to come: a preset or a YAML file.", metavar="PRESET_OR_YAML")],
    overrides: Overrides = None,
    figures: Annotated[
        str, typer.Option(help="What to count, with commas, also dates (and survey.column=NAME).")
    ] = "units,labels,lengths,cut,duplicates",
    out: Annotated[Path | None, typer.Option(help="The run folder, on this machine.")] = None,
    wait: WaitOption = True,
) -> None:
    """Ask the silos how many rows, labels and long texts they hold, before a run; approved as a run is."""
    start(coordinator, source, [*(overrides or []), "rounds=0", f"survey.figures={figures}"], out, wait=wait)


# -- machines ----------------------------------------------------------------------------------------------------------


@federation.command()
def init(
    folder: Annotated[Path, typer.Argument(help="The coordinator's new folder.", metavar="DIR")],
    host: Annotated[str, typer.Option(help="The coordinator's public name.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="The proxy's port.")] = 443,
    inner_port: Annotated[
        int, typer.Option(min=1, max=65534, help="The SuperLink's port on 127.0.0.1; enrollment has the next.")
    ] = 8443,
    install: InstallOption = False,
) -> None:
    """Make a coordinator's certificates, its file, nginx's file and systemd units."""
    from silotune.deploy import initialize

    result = initialize.init(folder, host, port, inner_port, install)
    say(f"coordinator: {result.coordinator}")
    say(f"authority's fingerprint, to compare with silos: {result.fingerprint}")
    if not result.started:
        say(f"start: silotune federation up {result.coordinator}")
        say(f"and:   nginx -c {result.proxy} -e stderr -g 'daemon off;'")
    say(f"then:  silotune federation invite {result.coordinator} SILO")


@federation.command()
def up(coordinator: CoordinatorFile) -> None:
    """Run the coordinator's SuperLink and its queue of runs, in the foreground."""
    from silotune.deploy import processes

    processes.up(_settings(coordinator), _log)


@federation.command()
def join(silo: SiloFile) -> None:
    """Run a silo's worker and SuperNode, in the foreground."""
    from silotune.deploy import processes
    from silotune.deploy.settings import read_silo_or_node_settings

    processes.join(silo, read_silo_or_node_settings(silo), _log)


@federation.command()
def invite(
    coordinator: CoordinatorFile,
    names: Annotated[list[str], typer.Argument(help="The silos' names.", metavar="SILO…")],
    out: Annotated[Path | None, typer.Option(help="The file to write (default: NAME.invite here).")] = None,
    days: Annotated[float, typer.Option(help="How long it is valid.")] = 7,
    replace: Annotated[bool, typer.Option("--replace", help="The silo has a key, and is to make another.")] = False,
) -> None:
    """Write invitations: address, authority, and a token that registers one key, once. Keep them secret."""
    from silotune.deploy import nodes

    if out is not None and len(names) > 1:
        raise InputError("--out: is the file of one invitation; those of several silos are NAME.invite")
    for name in names:
        path = out or Path(f"{name}.invite")
        invitation = nodes.invite(_settings(coordinator), name, path, days, replace)
        say(f"{path}: silo {name!r}, until {invitation.expires}; fingerprint {invitation.fingerprint}")


@federation.command()
def admit(
    coordinator: CoordinatorFile, silo: SiloName, key: Annotated[Path, typer.Argument(help="Its public key (….pub).")]
) -> None:
    """Register a silo's public key."""
    from silotune.deploy import nodes

    say(f"silo {silo!r} is node {nodes.register_node(_settings(coordinator), silo, key)}")


@federation.command()
def expel(coordinator: CoordinatorFile, silo: SiloName) -> None:
    """Remove a silo's public key: the silo left, or its key was lost and will be replaced."""
    from silotune.deploy import nodes

    say(f"silo {silo!r} was node {nodes.unregister_node(_settings(coordinator), silo)}; its key is removed")


@federation.command()
def renew(
    coordinator: CoordinatorFile,
    authority: Annotated[
        bool, typer.Option("--authority", help="Make a new authority, trusted beside the old one.")
    ] = False,
    key: Annotated[Path | None, typer.Option(help="The authority's key (default: ca.key beside ca.pem).")] = None,
) -> None:
    """Make a new server certificate from the same authority; an installed proxy reads it at once."""
    from silotune.deploy import initialize
    from silotune.deploy.files import reload_proxy

    days = initialize.renew(_settings(coordinator), authority, key)
    if authority:
        say(f"new authority, {days:.0f} days; invite every silo with --replace, then run `renew` without --authority")
    else:
        say(f"new certificate, {days:.0f} days; `federation up` takes it when no run is active")
        if not reload_proxy():
            say("to do: let nginx read it (nginx -s reload)")


@federation.command()
def doctor(
    coordinator: CoordinatorFile,
    backbone: Annotated[str, typer.Option(help="The backbone of the runs.")] = "default",
    as_json: JsonOption = False,
) -> None:
    """Check certificates, modes, ports, the proxy, versions, disk and backbone; exit code 1 for a problem."""
    from silotune.deploy.doctor import examine_coordinator
    from silotune.deploy.printing import print_findings

    print_findings(examine_coordinator(_settings(coordinator), backbone), as_json)


# -- runs --------------------------------------------------------------------------------------------------------------


@federation.command()
def start(
    coordinator: CoordinatorFile,
    source: Annotated[str, typer.Argument(help="A preset or a YAML file.", metavar="PRESET_OR_YAML")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run folder, on this machine.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    wait: WaitOption = True,
) -> None:
    """Start a run with the silos of `federation.silos`, or queue it behind the runs before it."""
    from silotune.deploy import queue
    from silotune.runs.build.resolve import read_config
    from silotune.runs.run import default_folder

    settings = _settings(coordinator)
    config = read_config(source, overrides or [])
    folder = (out or default_folder(source, config)).resolve()
    _begun(settings, queue.start(settings, config, folder, resume), wait)


@federation.command()
def runs(coordinator: CoordinatorFile, as_json: JsonOption = False) -> None:
    """List the coordinator's runs: queued, running and over."""
    from silotune.deploy.printing import print_runs
    from silotune.deploy.queue import RunQueue

    listed = [run.listed() for run in RunQueue(_settings(coordinator).folder).runs()]
    if as_json:
        typer.echo(json.dumps(listed, indent=1))
    else:
        print_runs(listed)


@federation.command()
def stop(coordinator: CoordinatorFile, run: RunNumber) -> None:
    """Stop a run, or take it out of the queue; its finished rounds are kept."""
    from silotune.deploy import queue

    stopped = queue.stop(_settings(coordinator), run)
    say(f"run {run}: {'is being stopped' if stopped.stop else 'stopped'}")


@federation.command()
def resume(
    coordinator: CoordinatorFile,
    run: RunNumber,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="federation.key=value …", metavar="[FEDERATION.KEY=VALUE]…")
    ] = None,
    wait: WaitOption = True,
) -> None:
    """Continue a run that failed or was stopped, also with another quorum, other deadlines or other silos."""
    from silotune.deploy import queue

    settings = _settings(coordinator)
    _begun(settings, queue.resume(settings, run, overrides or []), wait)


@federation.command()
def status(
    file: Annotated[Path, typer.Argument(help="The coordinator's or a silo's file (YAML).", metavar="YAML")],
    as_json: JsonOption = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with code 1 if it does not run or its link is down.")
    ] = False,
) -> None:
    """Show the state of a coordinator and its silos, or of a silo's processes and its link."""
    from silotune.deploy.printing import print_silo, print_status
    from silotune.deploy.settings import CoordinatorSettings, read_party
    from silotune.deploy.status import federation_status, silo_status

    party = read_party(file)
    if isinstance(party, CoordinatorSettings):
        state = federation_status(party)
        if as_json:
            typer.echo(json.dumps(state, indent=1))
        else:
            print_status(state)
        healthy = state["coordinator"]["running"] and not state["coordinator"]["superlink"]
    else:
        state = silo_status(party, file)
        print_silo(state, as_json)
        healthy = state["running"] and not (state["link"] or {}).get("reason")
    if check and not healthy:
        raise typer.Exit(1)


@federation.command()
def audit(
    folder: Annotated[Path, typer.Argument(help="A run folder, or the coordinator's folder.", metavar="FOLDER")],
    as_json: JsonOption = False,
) -> None:
    """Check the coordinator's audit log of messages and decisions, and sum it up; exit code 1 if it was changed."""
    from silotune.deploy.printing import print_audit
    from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER, log_folder

    print_audit(log_folder(folder) if (folder / FEDERATION_FOLDER).is_dir() else folder, as_json)


@federation.command()
def dossier(
    run: Annotated[Path, typer.Argument(help="A finished run's folder, at the coordinator.", metavar="RUN")],
    about: Annotated[Path, typer.Option(help="What no record says: a YAML file with purpose, parties, and more.")],
    silo_files: Annotated[
        list[Path] | None, typer.Option("--silo", help="A silo's file on this machine, for policy and approval.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file; .md and .html are written.")] = Path("dossier.md"),
) -> None:
    """Write what a data-protection officer asks of a run, from its records: who, what left, approvals, ε, hashes."""
    from silotune.deploy.dossier import write_dossier

    for file in write_dossier(run, out, about, silo_files or []):
        say(f"wrote {file}")


def _begun(settings: CoordinatorSettings, run: QueuedRun, wait: bool) -> None:
    """Tell where a run is; then show its progress until it is over, and its results."""
    from silotune.cli.console import console
    from silotune.cli.progress import show_progress
    from silotune.cli.result_table import result_table
    from silotune.deploy import queue
    from silotune.deploy.printing import incidents, print_survey
    from silotune.runs.callbacks.base import EventFeed
    from silotune.runs.storage.readers import read_summary

    say(f"run {run.number} in {run.out}")
    if not wait:
        return
    with (
        show_progress() as followers,
        EventFeed(Path(run.out), run.rounds, followers(run.method, run.rounds)) as feed,
    ):
        queue.follow(settings, run.number, feed, say)
    summary = read_summary(Path(run.out))
    if "survey" in summary:
        print_survey(summary["survey"])
    else:
        console.print(result_table([summary]))
    for line in incidents(Path(run.out)):
        say(f"note: {line}")


def run_plan(
    coordinator: Path, out: Path, tell: Callable[[str], None], cells: Mapping[str, Config], begun: Callable[[], None]
) -> None:
    """Run a plan, or continue waiting for its end; names the silos whose operators have not approved it."""
    from silotune.deploy import queue
    from silotune.distributed.protocol.frames import WAITS_FOR_APPROVAL

    settings, notices = _settings(coordinator), set[str]()
    run = queue.start_plan(settings, cells, out)
    begun()
    if run is None:
        return
    tell(f"run {run.number} in {run.out}: {len(cells)} runs as one plan; after Ctrl-C it goes on, and so does --resume")

    def progress(_number: int, activity: str, _done: int, _total: int) -> None:
        if activity.startswith(WAITS_FOR_APPROVAL) and activity not in notices:
            notices.add(activity)
            tell(activity)

    queue.follow(settings, run.number, progress, tell)


def _settings(file: Path) -> CoordinatorSettings:
    from silotune.deploy.settings import read_coordinator_settings

    return read_coordinator_settings(file)


def _log(text: str) -> None:
    """Print a line of a process that stays in the foreground, with its time (UTC)."""
    log_line(text, sys.stdout)
