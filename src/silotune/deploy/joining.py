"""`silotune silo join`: makes and registers a silo's key, writes settings and units; `replace_key`.

The key is made here and never leaves; the coordinator gets the public key and the invitation's token, over TLS.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from silotune.config import Config
from silotune.core.yaml_text import dump_yaml
from silotune.deploy.certificates import check_public_key, make_node_key, public_node_key
from silotune.deploy.coordinator_client import register
from silotune.deploy.invitations import Invitation
from silotune.deploy.owned_files import (
    filled,
    install_units,
    make_user,
    may_read,
    own,
    program,
    replace,
    require_absent,
    require_root,
    state_folder,
    write_new,
)
from silotune.distributed.flower.commands import require_flower
from silotune.distributed.silo.silo_config import read_silo_settings
from silotune.errors import InputError
from silotune.runs.build.resolve import read_config

WORKER, NODE = "silotune-worker", "silotune-node"
"""Users of an installed silo; their folders under /var/lib have the same names."""

_SOCKET = "/run/silotune/worker.sock"


@dataclass(frozen=True)
class Answers:
    """What the operator says of a silo.

    Args:
        data: the file or folder of rows.
        text: the text column, or the two of a pair.
        label: the label column.
        task: the name that silos with the same labels share; None: the silo's own.
        policy: a preset's name.
        approval: `ask` or `policy`.
        share: the numbers that may leave.
        backbone: `default`, or a folder on this machine.
        epsilon: the privacy budget of all runs; with it a secret for the noise is made.
    """

    data: Path
    text: tuple[str, ...] = ("text",)
    label: str = "label"
    task: str | None = None
    policy: str = "partners"
    approval: str = "ask"
    share: tuple[str, ...] = ("validation", "test", "rows")
    backbone: str = "default"
    epsilon: float | None = None


@dataclass(frozen=True)
class Joined:
    """What `join` made.

    Args:
        settings: the silo's file.
        rows: how many rows were read.
        started: whether systemd has started worker and node.
        warnings: what the operator has to see to.
    """

    settings: Path
    rows: int
    started: bool
    warnings: tuple[str, ...] = ()


def join(
    invitation: Invitation, folder: Path, answers: Answers, install: bool = False, registers: bool = True
) -> Joined:
    """Check the rows, make the key, register it, and write the silo's files.

    A repeated call after a failed registration uses the key that is there.

    Args:
        invitation: the invitation's content.
        folder: where to; the silo's files may not exist.
        answers: the operator's.
        install: make users, give them their files, install units and start them; for root.
        registers: ask the coordinator to register the key; else its operator does, by `federation admit`.

    Raises:
        SilotuneError: the coordinator does not answer.
    """
    require_flower()
    if install:
        require_root()
    folder = folder.resolve()
    settings, node, key = folder / "silo.yaml", folder / "node.yaml", folder / "silo.key"
    require_absent([settings, node], "choose another folder; for a new key of this silo give --new-key")
    rows = _count_rows(invitation.silo, answers)
    fresh = folder / ".silo.yaml.new"
    fresh.unlink(missing_ok=True)
    write_new(fresh, dump_yaml(_silo_tree(invitation, answers, install)), 0o600)
    try:
        read_silo_settings(fresh)
        public = _key(key, invitation.silo)
        replace(folder / "ca.pem", invitation.ca.encode(), 0o644)
        if answers.epsilon is not None and not (folder / "noise.key").exists():
            write_new(folder / "noise.key", secrets.token_bytes(32), 0o600)
        if registers:
            register(invitation, public)
        fresh.rename(settings)
    except InputError as error:
        raise InputError(str(error).replace(str(fresh), str(settings))) from None
    finally:
        fresh.unlink(missing_ok=True)
    if not install:
        return Joined(settings, rows, False)
    write_new(node, dump_yaml(_node_tree(invitation)), 0o600)
    return _install(folder, settings, rows, answers)


def replace_key(invitation: Invitation, folder: Path) -> Path:
    """Register a new key for a silo that has its files, and take over the invitation's authority.

    Args:
        invitation: one made with `--replace`, or after the silo was expelled.
        folder: of the silo's `silo.yaml`.

    Returns:
        The key's file; the old ones stay as `NAME.old`.

    Raises:
        SilotuneError: the coordinator does not answer.
    """
    require_flower()
    folder = folder.resolve()
    settings = read_silo_settings(folder / "silo.yaml")
    if settings.name != invitation.silo:
        raise InputError(f"the invitation is for silo {invitation.silo!r}; {folder / 'silo.yaml'} is {settings.name!r}")
    if settings.private_key is None or settings.root_certificates is None:
        raise InputError(f"{folder / 'silo.yaml'}: names no private_key and root_certificates")
    key, authority = Path(settings.private_key), Path(settings.root_certificates)
    fresh = key.with_name(f"{key.name}.next")  # kept until it is registered: a repeated call uses it again
    register(invitation, _key(fresh, invitation.silo))
    replace(key, fresh.read_bytes(), 0o600)
    fresh.unlink()
    fresh.with_name(f"{fresh.name}.pub").replace(key.with_name(f"{key.name}.pub"))
    if authority.read_bytes() != invitation.ca.encode():
        replace(authority, invitation.ca.encode(), 0o644)
    return key


def _count_rows(silo: str, answers: Answers) -> int:
    """Read the rows as a run would, and return how many there are."""
    from silotune.data.loading import load_silos

    text = list(answers.text) if len(answers.text) > 1 else answers.text[0]
    entry: dict[str, Any] = {"name": silo, "path": str(answers.data.resolve()), "text": text, "label": answers.label}
    if answers.task is not None:
        entry["task"] = answers.task
    splits = load_silos(config_of_one({"silos": [entry]}))[0].splits
    return len(splits.train) + len(splits.validation) + len(splits.test)


def config_of_one(tree: dict[str, Any]) -> Config:
    """Return a configuration in which one silo trains by itself.

    Args:
        tree: its keys, beside the method.
    """
    with TemporaryDirectory(prefix="silotune-") as folder:
        path = Path(folder) / "one.yaml"
        path.write_text(dump_yaml({"method": "local"} | tree), encoding="utf-8")
        return read_config(str(path))


def _silo_tree(invitation: Invitation, answers: Answers, apart: bool) -> dict[str, Any]:
    """Return the content of `silo.yaml`."""
    text: str | list[str] = list(answers.text) if len(answers.text) > 1 else answers.text[0]
    data = {"path": str(answers.data.resolve()), "text": text, "label": answers.label}
    if answers.task is not None:
        data["task"] = answers.task
    backbone = answers.backbone
    if os.path.isdir(backbone):
        backbone = str(Path(backbone).resolve())
    tree: dict[str, Any] = {
        "name": invitation.silo,
        "folder": f"/var/lib/{WORKER}" if apart else "state",
        "data": data,
        "share": list(answers.share),
        "policy": answers.policy,
        "approval": answers.approval,
        "backbone": backbone,
    }
    if answers.epsilon is not None:
        tree |= {"secret": "noise.key", "epsilon": answers.epsilon}
    if apart:
        tree |= {"socket": _SOCKET, "socket_group": True}
    return tree | _connection(invitation)


def _node_tree(invitation: Invitation) -> dict[str, Any]:
    """Return the content of `node.yaml`, the file of a node whose worker is another user."""
    return {"name": invitation.silo, "folder": f"/var/lib/{NODE}", "socket": _SOCKET} | _connection(invitation)


def _connection(invitation: Invitation) -> dict[str, Any]:
    return {"superlink": invitation.superlink, "root_certificates": "ca.pem", "private_key": "silo.key"}


def _key(path: Path, silo: str) -> bytes:
    """Return the public key of a private key's file, which is made if it is not there."""
    if path.exists():
        public = public_node_key(path.read_bytes(), silo)
    else:
        private, public = make_node_key(silo)
        write_new(path, private, 0o600)
    check_public_key(public.decode())
    listed = path.with_name(f"{path.name}.pub")
    listed.unlink(missing_ok=True)
    write_new(listed, public)
    return public


def _install(folder: Path, settings: Path, rows: int, answers: Answers) -> Joined:
    """Make users and state folders, give files to their users, install units."""
    for user in (WORKER, NODE):
        make_user(user)
        state_folder(Path("/var/lib") / user, user)
    own(settings, WORKER)
    if answers.epsilon is not None:
        own(folder / "noise.key", WORKER)
    for name in ("node.yaml", "silo.key"):
        own(folder / name, NODE)
    data = answers.data.resolve()
    units = {
        f"{WORKER}.service": filled(
            f"systemd/{WORKER}.service",
            {"/opt/silotune/bin/silotune worker /etc/silotune/silo.yaml": f"{program()} worker {settings}"},
        ),
        f"{NODE}.service": filled(
            f"systemd/{NODE}.service",
            {
                "/opt/silotune/bin/silotune federation join /etc/silotune/node.yaml": f"{program()} federation join "
                f"{folder / 'node.yaml'}",
                "-/srv/silotune/data": f"-{data}",
            },
        ),
    }
    warnings = []
    if not may_read(WORKER, data):
        warnings.append(f"user {WORKER} cannot read {data}; give it the right to (chgrp, chmod or setfacl)")
    if may_read(NODE, data):
        warnings.append(f"user {NODE}, who runs the coordinator's app, can read {data}; take that right away (chmod)")
    return Joined(settings, rows, install_units(units), tuple(warnings))
