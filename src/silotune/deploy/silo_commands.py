"""The commands `silotune silo pending`, `show`, `approve`, `reject`, `audit`, of a silo's operator; `usual_file`.

`join` and `doctor` are in `setup_commands.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silotune.cli.console import JsonOption, say

if TYPE_CHECKING:
    from silotune.distributed.silo.approvals import Approvals, State

silo = typer.Typer(help="A silo's own decisions: which runs it takes part in.", no_args_is_help=True)

USUAL_FILES = (Path("silo.yaml"), Path("/etc/silotune/silo.yaml"))

SiloFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="The silo's own file (default: silo.yaml here, else /etc/silotune/silo.yaml).", metavar="YAML"
    ),
]

RunName = Annotated[str, typer.Argument(help="The run, as `silo pending` names it, or its beginning.", metavar="RUN")]


@silo.command()
def pending(config: SiloFile = None) -> None:
    """List the runs that wait for approval."""
    from silotune.distributed.protocol.frames import printable

    waiting = [request for request in _approvals(config).all() if request.state == "pending"]
    for request in waiting:
        say(f"{request.name}  since {request.seen}  {printable(request.description[0])}")
    if not waiting:
        say("no run waits for approval")


@silo.command()
def show(run: RunName, config: SiloFile = None) -> None:
    """Show a run in plain words: what would leave, how often, how protected, and what changed."""
    from silotune.distributed.protocol.frames import printable
    from silotune.distributed.silo.run_description import changes

    approvals = _approvals(config)
    request = approvals.named(run)
    decided = f" {request.decided}" if request.decided else ""
    say(f"run {request.name}: {request.state}{decided}, asked {request.seen}")
    for line in (*request.description, *changes(request, approvals.last_approved(request))):
        say(printable(line))


@silo.command()
def approve(run: RunName, config: SiloFile = None) -> None:
    """Let this silo take part in a run; it begins when the coordinator asks next."""
    _decide(run, config, "approved")


@silo.command()
def reject(run: RunName, config: SiloFile = None) -> None:
    """Keep this silo out of a run; one that was approved gets no further answer."""
    _decide(run, config, "rejected")


@silo.command()
def audit(config: SiloFile = None, as_json: JsonOption = False) -> None:
    """Check the audit log of all messages that left this silo, and sum it up per run; exit code 1 if it was changed."""
    from silotune.deploy.print_audit import print_audit
    from silotune.distributed.silo.silo_config import read_silo_settings

    print_audit(Path(read_silo_settings(usual_file(config)).folder), as_json)


def _decide(run: str, config: Path | None, state: State) -> None:

    say(f"run {_approvals(config).decide(run, state).name} is {state}")


def _approvals(config: Path | None) -> Approvals:
    """Return the decisions kept in the folder of a silo's file."""
    from silotune.distributed.silo.approvals import Approvals
    from silotune.distributed.silo.silo_config import read_silo_settings

    return Approvals(Path(read_silo_settings(usual_file(config)).folder))


def usual_file(config: Path | None) -> Path:
    """Return the silo's file: the given one, else the first of `USUAL_FILES` that exists."""
    from silotune.errors import InputError

    path = config or next((path for path in USUAL_FILES if path.is_file()), None)
    if path is None:
        raise InputError(f"--config: name the silo's file; there is no {' and no '.join(map(str, USUAL_FILES))}")
    return path
