"""The commands with which parties set up a federation: `federation init|invite|renew|doctor`, `silo join|doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silotune.cli.console import JsonOption
from silotune.deploy.federation_commands import CoordinatorFile, SiloName, federation
from silotune.deploy.silo_commands import SiloFile, silo, usual_file

if TYPE_CHECKING:
    from silotune.deploy.checks import Finding

InvitationFile = Annotated[Path, typer.Argument(help="The invitation from the coordinator.", metavar="FILE")]

InstallOption = Annotated[
    bool, typer.Option("--install", help="Make users, give them their files, install and start systemd units (root).")
]


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
    from silotune.cli.console import say
    from silotune.deploy import initialize

    made = initialize.init(folder, host, port, inner_port, install)
    say(f"coordinator: {made.coordinator}")
    say(f"authority's fingerprint, to compare with silos: {made.fingerprint}")
    if not made.started:
        say(f"start: silotune federation up {made.coordinator}")
        say(f"and:   nginx -c {made.proxy} -e stderr -g 'daemon off;'")
    say(f"then:  silotune federation invite {made.coordinator} SILO")


@federation.command()
def invite(
    coordinator: CoordinatorFile,
    name: SiloName,
    out: Annotated[Path | None, typer.Option(help="The file to write (default: NAME.invite here).")] = None,
    days: Annotated[float, typer.Option(help="How long it is valid.")] = 7,
    replace: Annotated[bool, typer.Option("--replace", help="The silo has a key, and is to make another.")] = False,
) -> None:
    """Write an invitation: address, authority, and a token that registers one key, once. Keep it secret."""
    from silotune.cli.console import say
    from silotune.deploy import invitations
    from silotune.deploy.party_configs import read_coordinator_settings

    path = out or Path(f"{name}.invite")
    made = invitations.invite(read_coordinator_settings(coordinator), name, path, days, replace)
    say(f"{path}: silo {name!r}, until {made.expires}; fingerprint {made.fingerprint}")


@federation.command()
def renew(
    coordinator: CoordinatorFile,
    authority: Annotated[
        bool, typer.Option("--authority", help="Make a new authority, trusted beside the old one.")
    ] = False,
    key: Annotated[Path | None, typer.Option(help="The authority's key (default: ca.key beside ca.pem).")] = None,
) -> None:
    """Make a new server certificate from the same authority; then restart coordinator and proxy."""
    from silotune.cli.console import say
    from silotune.deploy import initialize
    from silotune.deploy.party_configs import read_coordinator_settings

    days = initialize.renew(read_coordinator_settings(coordinator), authority, key)
    if authority:
        say(f"new authority, {days:.0f} days; invite every silo with --replace, then run `renew` without --authority")
    else:
        say(f"new certificate, {days:.0f} days; restart coordinator and proxy")


@federation.command("doctor")
def federation_doctor(
    coordinator: CoordinatorFile,
    backbone: Annotated[str, typer.Option(help="The backbone of the runs.")] = "default",
    as_json: JsonOption = False,
) -> None:
    """Check certificates, modes, ports, the proxy, versions, disk and backbone; exit code 1 for a problem."""
    from silotune.deploy.doctor import examine_coordinator
    from silotune.deploy.party_configs import read_coordinator_settings

    _report(examine_coordinator(read_coordinator_settings(coordinator), backbone), as_json)


@silo.command("join")
def silo_join(
    invitation: InvitationFile,
    data: Annotated[Path | None, typer.Option(help="The rows: a file or folder.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="The text column; twice for a pair.")] = None,
    label: Annotated[str, typer.Option(help="The label column.")] = "label",
    task: Annotated[str | None, typer.Option(help="The name that silos with the same labels share.")] = None,
    policy: Annotated[str, typer.Option(help="partners, hospital or lab.")] = "partners",
    approval: Annotated[str, typer.Option(help="ask or policy.")] = "ask",
    share: Annotated[str, typer.Option(help="Numbers that may leave, with commas.")] = "validation,test,rows",
    backbone: Annotated[str, typer.Option(help="default, or a folder.")] = "default",
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget of all runs, where noise is added.")] = None,
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
    from silotune.cli.console import say
    from silotune.deploy import joining
    from silotune.deploy.invitations import Invitation
    from silotune.errors import InputError

    found = Invitation.read(invitation)
    if new_key:
        known = to or usual_file(None).parent
        say(f"{joining.replace_key(found, known)}: new key; restart the silo's node")
        return
    if data is None:
        raise InputError("--data: name the file or folder of rows")
    folder = to or (Path("/etc/silotune") if install else Path(found.silo))
    shared = tuple(word.strip() for word in share.split(",") if word.strip())
    answers = joining.Answers(data, tuple(text or ["text"]), label, task, policy, approval, shared, backbone, epsilon)
    say(f"coordinator {found.superlink}, fingerprint {found.fingerprint}")
    made = joining.join(found, folder, answers, install, register)
    say(f"silo {found.silo!r}: {made.rows} rows; settings: {made.settings}")
    if not register:
        say(f"to do: give the coordinator {made.settings.with_name('silo.key.pub')}, for `federation admit`")
    for warning in made.warnings:
        say(f"to do: {warning}")
    if not install:
        say(f"start: silotune federation join {made.settings}")
    elif not made.started:
        say("systemd does not run here; start the worker and the node as the units say")


@silo.command("doctor")
def silo_doctor(
    config: SiloFile = None,
    train: Annotated[bool, typer.Option(help="Load backbone and rows, and train one step here.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Check key, connection, clock, versions, disk and backbone, and train one step; exit code 1 for a problem."""
    from silotune.deploy.doctor import examine_silo
    from silotune.deploy.party_configs import read_silo_or_node_settings

    _report(examine_silo(read_silo_or_node_settings(usual_file(config)), train), as_json)


def _report(findings: list[Finding], as_json: bool) -> None:
    """Print findings, and end with code 1 if there is a problem."""
    from silotune.cli.console import say
    from silotune.deploy.checks import as_fields

    failed = any(finding.state == "problem" for finding in findings)
    if as_json:
        import json

        typer.echo(json.dumps({"ok": not failed, "checks": as_fields(findings)}, indent=1))
    else:
        for finding in findings:
            say(f"{finding.state:<8} {finding.check:<16} {finding.detail}")
            if finding.remedy:
                say(f"{'':<25} remedy: {finding.remedy}")
    if failed:
        raise typer.Exit(1)
