"""The commands `silotune silo …` of a silo's operator: to join a federation, and to decide about its runs."""

from __future__ import annotations

import json
import shlex
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silotune.cli.console import JsonOption, say
from silotune.core.clock import utc_now
from silotune.errors import InputError

if TYPE_CHECKING:
    from silotune.distributed.silo.approvals import Approvals, State, WaitingRun

silo = typer.Typer(help="A silo's own decisions: which federation it joins, and which runs.", no_args_is_help=True)

WAIT_INTERVAL = 2.0
"""Seconds between looks whether a run waits for approval."""

USUAL_FILES = (Path("silo.yaml"), Path("/etc/silotune/silo.yaml"))

SiloFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="The silo's own file (default: silo.yaml here, else /etc/silotune/silo.yaml).", metavar="YAML"
    ),
]

InstallOption = Annotated[
    bool, typer.Option("--install", help="Have systemd make the users, set modes, and start the units (root).")
]

RunName = Annotated[str, typer.Argument(help="The run, as `silo pending` names it, or its beginning.", metavar="RUN")]


@silo.command()
def join(
    invitation: Annotated[Path, typer.Argument(help="The invitation from the coordinator.", metavar="FILE")],
    data: Annotated[Path | None, typer.Option(help="The rows: a file or folder.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="The text column; twice for a pair.")] = None,
    label: Annotated[str, typer.Option(help="The label column.")] = "label",
    labels: Annotated[
        str | None,
        typer.Option(help="All labels, with commas (default: those in the rows; --policy private needs them)."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="regression, multilabel, … (default: a row has one label, or an answer).")
    ] = None,
    task: Annotated[str | None, typer.Option(help="The name that silos with the same labels share.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="private (default), masked or trusting: what the coordinator may learn.")
    ] = None,
    approval: Annotated[str, typer.Option(help="ask or policy.")] = "ask",
    share: Annotated[str, typer.Option(help="Numbers that may leave, with commas.")] = "validation,test,rows",
    backbone: Annotated[str, typer.Option(help="default, or a folder.")] = "default",
    epsilon: Annotated[
        float | None, typer.Option(help="Privacy budget of all runs: of each unit, or of noise on whole updates.")
    ] = None,
    unit: Annotated[str, typer.Option(help="With --policy private: row, or a column such as patient.")] = "row",
    to: Annotated[
        Path | None, typer.Option(help="The silo's folder (default: /etc/silotune with --install, else ./NAME).")
    ] = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="Only replace the key of a silo that is set up.")] = False,
    register: Annotated[
        bool, typer.Option(help="Register the key; without, the coordinator does (`federation admit`).")
    ] = True,
    install: InstallOption = False,
) -> None:
    """Make this silo's key and settings from an invitation, and register the key."""
    from silotune.deploy import joining
    from silotune.deploy.nodes import Invitation
    from silotune.distributed.silo.silo_config import PRESETS

    content = Invitation.read(invitation)
    if new_key:
        home = to or usual_file(None).parent
        say(f"{joining.replace_key(content, home)}: new key; restart the silo's node")
        return
    if data is None:
        raise InputError("--data: name the file or folder of rows")
    labels_later, policy = policy is None, policy or "private"
    if policy == "private" and epsilon is None:
        epsilon = 8.0
    folder = to or (Path("/etc/silotune") if install else Path(content.silo))
    columns, names = tuple(text or ["text"]), None if labels is None else _words(labels)
    answers = joining.Answers(
        data, policy, columns, label, names, kind, task, approval, _words(share), backbone, epsilon, unit, labels_later
    )
    say(f"coordinator {content.superlink}, fingerprint {content.fingerprint}")
    result = joining.join(content, folder, answers, install, register)
    say(f"silo {content.silo!r}: {result.rows} rows; settings: {result.settings}")
    for warning in result.warnings:
        say(f"warning: {warning}")
    budget = f" (ε = {epsilon:g} for each {unit})" if policy == "private" else ""
    say(f"policy {policy}: {PRESETS[policy]}{budget}")
    if not result.declared:
        say(
            f"to do: name all labels in {result.settings} (data: labels: [bad, good]), also those that no row has; "
            "until then `silo doctor` and private runs refuse"
        )
    if result.identity:
        say(f"identity of {content.silo}: {' '.join(result.identity[at : at + 4] for at in range(0, 64, 4))}")
        say(
            f"to do: tell the other silos' operators, not through the coordinator; put their identities into "
            f"masked.peers of {result.settings}; then compare the fingerprint that `silotune silo doctor` shows"
        )
    if not register:
        say(f"to do: give the coordinator {result.settings.with_name('silo.key.pub')}, for `federation admit`")
    if not install:
        say(f"start: silotune federation join {result.settings}")
        return
    path, user = shlex.quote(str(data.resolve())), joining.WORKER
    say(f"to do: let user {user}, and no other, read the rows: chown -R {user} {path} && chmod -R go= {path}")
    if not result.started:
        say("systemd does not run here; start the worker and the node as the units say")


@silo.command()
def doctor(
    config: SiloFile = None,
    train: Annotated[bool, typer.Option(help="Load backbone and rows, and train one step here.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Check key, connection, clock, versions, disk and backbone, and train one step; exit code 1 for a problem."""
    from silotune.deploy.doctor import examine_silo
    from silotune.deploy.printing import print_findings
    from silotune.deploy.settings import read_silo_or_node_settings

    print_findings(examine_silo(read_silo_or_node_settings(usual_file(config)), train), as_json)


@silo.command()
def status(config: SiloFile = None, as_json: JsonOption = False) -> None:
    """Show the present run and round, runs that wait, the ε that is left, and the link; as root also an own node's."""
    from silotune.deploy.printing import print_silo
    from silotune.deploy.status import silo_status
    from silotune.distributed.silo.silo_config import read_silo_settings

    file = usual_file(config)
    print_silo(silo_status(read_silo_settings(file), file), as_json)


@silo.command()
def pending(config: SiloFile = None) -> None:
    """List the runs that wait for approval."""
    from silotune.distributed.protocol.frames import printable

    approvals = _approvals(config)
    waiting = [request for request in approvals.all() if request.state == "pending"]
    for name, until, times in approvals.standing():
        say(f"standing approval of {name}: {times} more runs before {until}")
    for request in waiting:
        say(f"{request.name}  since {request.seen}  {printable(request.description[0])}")
    if not waiting:
        say("no run waits for approval")


@silo.command()
def show(run: RunName, config: SiloFile = None) -> None:
    """Show a run in plain words: what would leave, how often, how protected, and what changed."""
    approvals = _approvals(config)
    _show(approvals, approvals.named(run))


def _show(approvals: Approvals, request: WaitingRun) -> None:
    from silotune.distributed.protocol.frames import printable
    from silotune.distributed.silo.run_description import changes

    decided = f" {request.decided}" if request.decided else ""
    say(f"run {request.name}: {request.state}{decided}, asked {request.seen}")
    for line in (*request.description, *changes(request, approvals.last_approved(request))):
        say(printable(line))


@silo.command()
def approve(
    run: Annotated[
        str | None, typer.Argument(help="The run, as `silo pending` names it, or its beginning.", metavar="[RUN]")
    ] = None,
    config: SiloFile = None,
    wait: Annotated[bool, typer.Option("--wait", help="If none waits yet, wait for the next one.")] = False,
    until: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="Also approve runs of the same keys before this date.")
    ] = None,
    times: Annotated[int | None, typer.Option(min=1, help="With --until: how many such runs at most.")] = None,
) -> None:
    """Let this silo take part in a run; without RUN, the only one that waits is shown, and you are asked."""
    if (until is None) != (times is None) or (until is not None and f"{until:%Y-%m-%d}" <= utc_now()):
        raise InputError("--until: a standing approval needs an end after today and a count: --until DATE --times N")
    if run is None:
        approvals = _approvals(config)
        while not (waiting := [request for request in approvals.all() if request.state == "pending"]) and wait:
            time.sleep(WAIT_INTERVAL)
        if not waiting:
            raise InputError("RUN: no run waits for approval yet; `silotune silo approve --wait` waits for the next")
        if len(waiting) > 1:
            raise InputError(f"RUN: {len(waiting)} runs wait for approval; `silotune silo pending` names them")
        _show(approvals, waiting[0])
        if not typer.confirm("approve this run?"):
            raise typer.Exit(1)
        run = waiting[0].name
    decided = _decide(run, config, "approved")
    if until is not None and times is not None:
        _approvals(config).stand(decided, f"{until:%Y-%m-%d}", times)
        say(f"so are {times} more runs of the same keys before {until:%Y-%m-%d}; `silotune silo reject` ends that")


@silo.command()
def reject(run: RunName, config: SiloFile = None) -> None:
    """Keep this silo out of a run; an approved run gets no further answers."""
    _decide(run, config, "rejected")


@silo.command()
def audit(config: SiloFile = None, as_json: JsonOption = False) -> None:
    """Check the audit log of all messages that left this silo, and sum it up per run; exit code 1 if it was changed."""
    from silotune.deploy.printing import print_audit
    from silotune.distributed.silo.silo_config import read_silo_settings
    from silotune.distributed.silo.store import SiloStore

    settings = read_silo_settings(usual_file(config))
    folder = Path(settings.folder)
    print_audit(folder, as_json, SiloStore(folder, budget=settings.privacy).ledger)


@silo.command()
def rows(
    withdrawn: Annotated[
        Path | None, typer.Option(help="Rows that later runs leave out: a file with the text columns.")
    ] = None,
    config: SiloFile = None,
    as_json: JsonOption = False,
) -> None:
    """List which runs used this silo's rows; with --withdrawn, leave rows out of later runs, and name their models."""
    from silotune.data.loading import load_silos
    from silotune.deploy.joining import config_of_one
    from silotune.distributed.silo import withdrawn_rows
    from silotune.distributed.silo.silo_config import read_silo_settings
    from silotune.distributed.silo.store import SiloStore

    settings = read_silo_settings(usual_file(config))
    records, marks = SiloStore(Path(settings.folder)).records, None
    if withdrawn is not None:
        if settings.data is None:
            raise InputError("--withdrawn: needs data in the silo's file; a folder of prepared rows is made anew")
        marks = withdrawn_rows.marks_of(records.folder, withdrawn_rows.read_withdrawn(withdrawn, settings.data))
        withdrawn_rows.withdraw(records, marks)
    runs, others = withdrawn_rows.uses(records, settings.name, marks), None
    count = None if marks is None else len({*marks})
    try:
        if marks is not None and settings.data is not None:
            (own,) = load_silos(config_of_one({"silos": [settings.data.model_dump(mode="json", exclude_none=True)]}))
            others = len({*marks} - {*withdrawn_rows.marks_of(records.folder, own.splits.all())})
    finally:  # also where the file is unreadable by now
        if as_json:
            typer.echo(json.dumps({"withdrawn": count, "not_in_file": others, "runs": runs}, indent=1))
        else:
            _say_uses(runs, count)
    if others and settings.data is not None and not as_json:
        say(f"{others} of them are not in {settings.data.path} now; a text counts only as it stood there")


def _say_uses(runs: list[dict[str, Any]], withdrawn: int | None) -> None:
    """Print which runs used a silo's rows: all rows, or so many that were withdrawn."""
    from silotune.data.row_checks import SPLITS
    from silotune.distributed.silo.withdrawn_rows import BEFORE, NOT_UNDONE

    if withdrawn is not None:
        say(f"{withdrawn} rows are left out of all runs that begin from now on")
    for run in runs:
        counts = ", ".join(f"{run[split]} {split}" for split in (*SPLITS, BEFORE) if run[split])
        say(f"run {run['run']}: {counts}; model: {run['model'] or 'no longer here'}")
    if not runs:
        say("no run used these rows" if withdrawn else "no run used rows yet")
    elif withdrawn:
        say(NOT_UNDONE)


def _words(text: str) -> tuple[str, ...]:
    """Split an option at its commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _decide(name: str, config: Path | None, state: State) -> WaitingRun:
    """Record a decision on a run or a plan, and set aside again or free what it reserved for noise on rows."""
    from silotune.distributed.silo.approvals import PLAN
    from silotune.distributed.silo.mask_work import erase_secrets
    from silotune.distributed.silo.store import SiloStore

    decided, store = _approvals(config).decide(name, state), SiloStore(_folder(config))
    say(f"run {decided.name} is {state}")
    for run in (decided.run, *(run for run, _ in decided.configuration.get(PLAN, ()))):
        store.ledger.close(run, again=state == "approved")
        if state == "rejected":
            erase_secrets(store, run)
    return decided


def _approvals(config: Path | None) -> Approvals:
    """Return the decisions kept in the folder of a silo's file."""
    from silotune.distributed.silo.approvals import Approvals

    return Approvals(_folder(config))


def _folder(config: Path | None) -> Path:
    from silotune.distributed.silo.silo_config import read_silo_settings

    return Path(read_silo_settings(usual_file(config)).folder)


def usual_file(config: Path | None) -> Path:
    """Return the silo's file: the given one, else the first of `USUAL_FILES` that exists."""
    path = config or next((path for path in USUAL_FILES if path.is_file()), None)
    if path is None:
        raise InputError(f"--config: name the silo's file; there is no {' and no '.join(map(str, USUAL_FILES))}")
    return path
