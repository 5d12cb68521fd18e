"""Make and register a silo's key and write its settings and units (`silo join`), or replace the key.

The key is made here and never leaves; the coordinator gets the public key and the invitation's token, over TLS.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from silotune.communication.privacy.accountant import usual_delta
from silotune.config import Config
from silotune.core.files import dump_yaml
from silotune.deploy.certificates import make_node_key, public_node_key
from silotune.deploy.enrollment import enroll
from silotune.deploy.files import filled, install, program, replace_content, require_absent, require_root, write_new
from silotune.deploy.nodes import Invitation
from silotune.distributed.flower.commands import require_flower
from silotune.distributed.silo.mask_work import made_identity
from silotune.distributed.silo.silo_config import read_silo_settings
from silotune.errors import InputError
from silotune.runs.build.resolve import read_config

WORKER, NODE = "silotune-worker", "silotune-node"
"""Users of an installed silo; their folders under /var/lib have the same names."""

_SOCKET = "/run/silotune/worker.sock"


@dataclass(frozen=True)
class Answers:
    """The operator's choices for a silo that joins.

    Args:
        kind: of the task, such as regression.
        task: the name that silos with the same labels share; None: the silo's own.
        epsilon: the privacy budget of all runs: with policy `private` of each unit, else of noise on whole updates,
            for which a secret is made.
        unit: whom policy `private` protects.
        labels_later: whether a silo under `private` may join before its labels are declared.
    """

    data: Path
    policy: str
    text: tuple[str, ...] = ("text",)
    label: str = "label"
    labels: tuple[str, ...] | None = None
    kind: str | None = None
    task: str | None = None
    approval: str = "ask"
    share: tuple[str, ...] = ("validation", "test", "rows")
    backbone: str = "default"
    epsilon: float | None = None
    unit: str = "row"
    labels_later: bool = False

    @property
    def on_updates(self) -> bool:
        """Whether the budget is of noise on whole updates."""
        return self.epsilon is not None and self.policy != "private"

    def entry(self, silo: str) -> dict[str, Any]:
        """Return the silo's rows as an entry of `silos`."""
        text: str | list[str] = list(self.text) if len(self.text) > 1 else self.text[0]
        entry = {"name": silo, "path": str(self.data.resolve()), "text": text, "label": self.label}
        more = {"labels": self.labels and [*self.labels], "kind": self.kind, "task": self.task}
        return entry | {key: value for key, value in more.items() if value is not None}


@dataclass(frozen=True)
class Joined:
    """The files that `silo join` made, and `identity`, what the operator tells the others with policy `masked`.

    Without `declared`, its labels are to be declared before the first run under policy `private`. `warnings` are about
    its rows.
    """

    settings: Path
    rows: int
    warnings: list[str]
    identity: str
    declared: bool = True
    started: bool = False


def join(
    invitation: Invitation, folder: Path, answers: Answers, installs: bool = False, registers: bool = True
) -> Joined:
    """Check the rows, make the key, register it, and write the silo's files.

    A repeated call after a failed registration uses the key that is there.
    """
    require_flower()
    if installs:
        require_root()
    folder = folder.resolve()
    settings, node, units = folder / "silo.yaml", folder / "node.yaml", folder / "systemd"
    require_absent([settings, node, units], "choose another folder; for a new key of this silo give --new-key")
    rows, warnings, declared = _read_rows(invitation.silo, answers)
    fresh = folder / ".silo.yaml.new"
    fresh.unlink(missing_ok=True)
    tree, identity = _silo_tree(invitation, answers, rows, apart=installs), ""
    if answers.policy == "masked":
        identity = made_identity(folder / "identity.key")
        tree["masked"] = {"identity": "identity.key", "peers": {invitation.silo: identity}}
    write_new(fresh, dump_yaml(tree), 0o600)
    try:
        read_silo_settings(fresh)
        public = _key(folder / "silo.key", invitation.silo)
        (folder / "ca.pem").write_text(invitation.ca, encoding="ascii")
        if answers.on_updates and not (folder / "noise.key").exists():
            write_new(folder / "noise.key", secrets.token_bytes(32), 0o600)
        if registers:
            enroll(invitation, public)
        fresh.rename(settings)
    except InputError as error:
        raise InputError(str(error).replace(str(fresh), str(settings))) from None
    finally:
        fresh.unlink(missing_ok=True)
    if not installs:
        return Joined(settings, rows, warnings, identity, declared)
    apart = {"name": invitation.silo, "folder": f"/var/lib/{NODE}", "socket": _SOCKET} | _connection(invitation)
    write_new(node, dump_yaml(apart), 0o600)
    paths = {"/etc/silotune": str(folder)}
    for name in (WORKER, NODE):
        values = {"/opt/silotune/bin/silotune": program()} | paths
        if name == NODE:
            values["-/srv/silotune/data"] = f"-{answers.data.resolve()}"
        write_new(units / f"{name}.service", filled(f"systemd/{name}.service", values))
    write_new(units / "sysusers.conf", filled("systemd/silo.sysusers.conf", {}))
    write_new(units / "tmpfiles.conf", filled("systemd/silo.tmpfiles.conf", paths))
    return Joined(settings, rows, warnings, identity, declared, install(units))


def replace_key(invitation: Invitation, folder: Path) -> Path:
    """Register a new key for a silo that has its files, and the invitation's authority; return the key's file."""
    folder = folder.resolve()
    settings = read_silo_settings(folder / "silo.yaml")
    if settings.name != invitation.silo:
        raise InputError(f"the invitation is for silo {invitation.silo!r}; {folder / 'silo.yaml'} is {settings.name!r}")
    if settings.private_key is None or settings.root_certificates is None:
        raise InputError(f"{folder / 'silo.yaml'}: names no private_key and root_certificates")
    key = Path(settings.private_key)
    fresh = key.with_name(f"{key.name}.next")  # kept until it is registered: a repeated call uses it again
    public = _key(fresh, invitation.silo)
    enroll(invitation, public)
    replace_content(key, fresh.read_bytes())
    key.with_name(f"{key.name}.pub").write_bytes(public)
    fresh.unlink()
    fresh.with_name(f"{fresh.name}.pub").unlink()
    replace_content(Path(settings.root_certificates), invitation.ca.encode())
    return key


def config_of_one(tree: dict[str, Any]) -> Config:
    """Return a configuration in which one silo trains alone."""
    with TemporaryDirectory(prefix="silotune-") as folder:
        path = Path(folder) / "one.yaml"
        path.write_text(dump_yaml({"method": "local"} | tree), encoding="utf-8")
        return read_config(str(path))


def _read_rows(silo: str, answers: Answers) -> tuple[int, list[str], bool]:
    """Read the rows as a run would, under policy `private` with noise.

    Returns:
        How many, what `silotune data` would warn of, and whether a run could read them so yet.
    """
    from silotune.data.loading import load_silos
    from silotune.data.row_checks import warnings_of
    from silotune.data.tasks import UndeclaredLabels

    def read(noise: dict[str, Any]) -> tuple[int, list[str]]:
        silos = load_silos(config_of_one({"silos": [answers.entry(silo)], **noise}))
        return sum(silos[0].splits.counts().values()), warnings_of(silos, central=False)

    try:
        return *read({"privacy": {"unit": answers.unit, "epsilon": 1.0}} if answers.policy == "private" else {}), True
    except UndeclaredLabels:
        if not answers.labels_later:
            raise
        return *read({} if answers.unit == "row" else {"evaluation": {"unit": answers.unit}}), False


def _silo_tree(invitation: Invitation, answers: Answers, rows: int, apart: bool) -> dict[str, Any]:
    """Return the content of `silo.yaml`."""
    backbone = answers.backbone
    tree: dict[str, Any] = {
        "name": invitation.silo,
        "folder": f"/var/lib/{WORKER}" if apart else "state",
        "data": {name: value for name, value in answers.entry(invitation.silo).items() if name != "name"},
        "share": list(answers.share),
        "policy": answers.policy,
        "approval": answers.approval,
        "backbone": str(Path(backbone).resolve()) if os.path.isdir(backbone) else backbone,
    }
    if answers.on_updates:
        tree |= {"secret": "noise.key", "epsilon": answers.epsilon}
    elif answers.epsilon is not None:
        delta = usual_delta(rows)
        tree |= {"privacy": {"unit": answers.unit, "epsilon": answers.epsilon, "delta": delta}}
    if apart:
        tree |= {"socket": _SOCKET, "socket_group": True}
    return tree | _connection(invitation)


def _connection(invitation: Invitation) -> dict[str, Any]:
    return {"superlink": invitation.superlink, "root_certificates": "ca.pem", "private_key": "silo.key"}


def _key(path: Path, silo: str) -> bytes:
    """Return the public key of a private key's file, which is made if it is not there."""
    if not path.exists():
        write_new(path, make_node_key(), 0o600)
    public = public_node_key(path.read_bytes(), silo)
    path.with_name(f"{path.name}.pub").write_bytes(public)
    return public
