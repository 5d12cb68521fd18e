"""The coordinator's records: whose keys are let in at the SuperLink, who is connected, and who was invited.

The SuperLink does not list the names of its nodes, so the coordinator's records keep them: one key per silo.
An invitation is the file with which a silo registers its key, once.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from silotune.config.validators import NAME_RULE, Address, Name, is_name
from silotune.core.clock import current_user
from silotune.core.files import read_json
from silotune.core.records import Records
from silotune.deploy.certificates import fingerprint
from silotune.deploy.files import require_absent, write_new
from silotune.deploy.settings import CoordinatorSettings
from silotune.distributed.flower.commands import flower_environment, run_flwr, write_home
from silotune.errors import InputError, SilotuneError, file_errors

PREFIX = "silo-"
"""Prefix of a silo's name at the SuperLink; `coordinator/dispatcher.py` compares it with the hello."""


_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    number INTEGER PRIMARY KEY, out TEXT NOT NULL UNIQUE, method TEXT NOT NULL, rounds INTEGER NOT NULL,
    silos TEXT NOT NULL, state TEXT NOT NULL, flower_id TEXT NOT NULL DEFAULT '',
    submissions INTEGER NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0, reached TEXT NOT NULL DEFAULT '',
    stop INTEGER NOT NULL DEFAULT 0, queued TEXT NOT NULL, began TEXT NOT NULL DEFAULT '',
    ended TEXT NOT NULL DEFAULT '', error TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS nodes (silo TEXT PRIMARY KEY, node TEXT NOT NULL, key_sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS invitations (
    silo TEXT PRIMARY KEY, token_sha256 TEXT NOT NULL, expires TEXT NOT NULL, replace INTEGER NOT NULL,
    key_sha256 TEXT);
"""


@contextmanager
def transaction(folder: str | Path) -> Iterator[sqlite3.Connection]:
    """Open the records in a coordinator's folder for one transaction, which is undone if the block raises."""
    with closing(Records(Path(folder), _TABLES)) as records, records.transaction() as database:
        database.row_factory = sqlite3.Row
        yield database


def record_decision(folder: str | Path, kind: str, **fields: str) -> None:
    """Record an action of the coordinator's operator, with the operator's name, in the audit log."""
    with closing(Records(Path(folder), _TABLES)) as records:
        records.append({"kind": kind, **fields, "user": current_user()})


def flwr_environment(settings: CoordinatorSettings) -> dict[str, str]:
    """Return the environment in which Flower's commands connect to this coordinator's SuperLink."""
    home = write_home(Path(settings.folder) / "flwr", settings.address, settings.ca)
    return flower_environment(home)


def check_silo_name(silo: str) -> None:
    """Refuse a name that a silo cannot have."""
    if not is_name(silo) or silo.startswith(PREFIX):
        raise InputError(f"silo {silo!r} cannot be a name; allowed: {NAME_RULE}, not beginning with {PREFIX!r}")


def key_digest(public: bytes) -> str:
    """Return the sha256 of a public key's type and value; its comment does not count."""
    return hashlib.sha256(b" ".join(public.split()[:2])).hexdigest()


def register_node(settings: CoordinatorSettings, silo: str, key: Path) -> str:
    """Register a silo's public key, and return the node's id."""
    check_silo_name(silo)
    if not key.is_file():
        raise InputError(f"key {key}: no such file; give the public key (….pub) of `ssh-keygen -t ecdsa -b 384`")
    content = key.read_bytes()
    if b"PRIVATE" in content:
        raise InputError(f"key {key}: is a private key, which stays with the silo; give the public one (….pub)")
    nodes = registered_nodes(settings)
    if silo in nodes:
        raise InputError(f"silo {silo!r}: is node {nodes[silo]} already; `silotune federation expel` takes it out")
    words = ["register", str(key), "silotune", "--name", f"{PREFIX}{silo}"]
    node = str(_flwr_supernode(settings, f"silo {silo!r} was not admitted", *words)["node-id"])
    with transaction(settings.folder) as database:
        database.execute("insert or replace into nodes values (?, ?, ?)", (silo, node, key_digest(content)))
    record_decision(settings.folder, "admitted", silo=silo, node=node)
    return node


def unregister_node(settings: CoordinatorSettings, silo: str) -> str:
    """Unregister a silo's key, and return the node's id; the node gets no further replies."""
    nodes = registered_nodes(settings)
    if silo not in nodes:
        raise InputError(f"silo {silo!r}: not admitted; admitted: {', '.join(sorted(nodes)) or 'none'}")
    try:
        _flwr_supernode(settings, f"silo {silo!r} was not expelled", "unregister", nodes[silo], "silotune")
    except SilotuneError:
        if silo in node_statuses(settings):
            raise  # a SuperLink whose database was lost does not know the node, and its key is void
    with transaction(settings.folder) as database:
        database.execute("delete from nodes where silo = ?", (silo,))
    record_decision(settings.folder, "expelled", silo=silo, node=nodes[silo])
    return nodes[silo]


def registered_nodes(settings: CoordinatorSettings) -> dict[str, str]:
    """Return the id of each registered silo's node."""
    with transaction(settings.folder) as database:
        return {row["silo"]: row["node"] for row in database.execute("select * from nodes")}


def has_key(settings: CoordinatorSettings, silo: str, public: bytes) -> bool:
    """Return whether a silo's registered key is this one."""
    with transaction(settings.folder) as database:
        row = database.execute("select key_sha256 from nodes where silo = ?", (silo,)).fetchone()
    return row is not None and row["key_sha256"] == key_digest(public)


def node_statuses(settings: CoordinatorSettings) -> dict[str, str]:
    """Return the status of each node in Flower's words, by silo (or by id if it was not registered here)."""
    names = {node: silo for silo, node in registered_nodes(settings).items()}
    listed = _flwr_supernode(settings, "nodes", "list", "silotune").get("nodes", [])
    states = {names.get(str(node["node-id"]), f"node {node['node-id']}"): str(node["status"]) for node in listed}
    return {name: state for name, state in states.items() if state != "unregistered"}


def _flwr_supernode(settings: CoordinatorSettings, failure: str, *words: str) -> dict[str, Any]:
    """Run `flwr supernode …` and return its JSON output."""
    process = run_flwr(["flwr", "supernode", *words, "--format", "json"], flwr_environment(settings), failure)
    try:
        output = dict(json.loads(process.stdout))
    except (ValueError, TypeError):
        output = {"error-message": f"{process.stdout} {process.stderr}"}
    if output.get("success") is not True:
        reason = " ".join(str(output.get("error-message", output)).split())
        raise SilotuneError(f"{failure}: {reason[-300:]}")
    return output


DAYS = 7.0
"""Days for which an invitation is valid."""


class InvitationRefused(InputError):
    """The token cannot register a key: it is unknown, used or expired."""


class Invitation(BaseModel):
    """The content of an invitation's file, which is secret until it is used.

    Args:
        token: what registers one key, once.
        fingerprint: sha256 of the authority's certificate, to be compared over another channel.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    silo: Name
    superlink: Address
    token: str
    expires: str
    fingerprint: str
    ca: str
    invitation: Literal[1] = 1

    @classmethod
    def read(cls, path: Path) -> Invitation:
        """Read an invitation's file."""
        try:
            with file_errors(f"invitation {path}: cannot be read"):
                invitation = cls.model_validate(read_json(path))
        except ValueError as error:
            raise InputError(f"invitation {path}: is damaged, or of another version; ask for another") from error
        if fingerprint(invitation.ca.encode()) != invitation.fingerprint:
            raise InputError(f"invitation {path}: its certificate is not that of its fingerprint; ask for another")
        if _expired(invitation.expires):
            raise InputError(f"invitation {path}: expired {invitation.expires}; ask the coordinator for another")
        return invitation


def invite(
    settings: CoordinatorSettings, silo: str, path: Path, days: float = DAYS, replace: bool = False
) -> Invitation:
    """Write an invitation for a silo, and note its token's hash; an earlier one of the same silo is void."""
    check_silo_name(silo)
    if settings.ca is None or settings.public_address is None or settings.enrollment_port is None:
        raise InputError("invite: set public_address (HOST:PORT) and enrollment_port in the coordinator's file")
    if not 0 < days <= 90:
        raise InputError(f"--days {days:g}: allowed: more than 0, at most 90")
    if not replace and silo in registered_nodes(settings):
        raise InputError(f"silo {silo!r}: is admitted already; --replace invites it to register a new key instead")
    require_absent([path], "remove it, or name another with --out")
    with file_errors(f"ca {settings.ca}: cannot be read"):
        authority = Path(settings.ca).read_bytes()
    token = secrets.token_urlsafe(32)
    expires = (datetime.now(UTC) + timedelta(days=days)).isoformat(timespec="seconds")
    invitation = Invitation(
        silo=silo,
        superlink=settings.public_address,
        token=token,
        expires=expires,
        fingerprint=fingerprint(authority),
        ca=authority.decode("ascii"),
    )
    note(Path(settings.folder), silo, token, expires, replace)
    write_new(path, invitation.model_dump_json(indent=1) + "\n", 0o600)
    return invitation


def note(folder: Path, silo: str, token: str, expires: str, replace: bool) -> None:
    """Note an invitation's hash in the coordinator's folder."""
    with transaction(folder) as database:
        row = (silo, _digest(token), expires, replace)
        database.execute("insert or replace into invitations values (?, ?, ?, ?, null)", row)


def claim(folder: Path, silo: str, token: str, public: bytes) -> bool:
    """Use a silo's invitation for a public key; return whether the key replaces an earlier one of the silo.

    The same key may claim it again: the answer to the first time may have been lost. Before another key may, the claim
    is to be undone by `unclaim`.
    """
    with transaction(folder) as database:
        row = database.execute("select * from invitations where silo = ?", (silo,)).fetchone()
        expected = row["token_sha256"] if row else _digest("")
        if not hmac.compare_digest(expected, _digest(token)) or row is None:
            raise InvitationRefused(f"silo {silo!r}: no such invitation; ask the coordinator for another")
        if row["key_sha256"] not in (None, key_digest(public)):
            raise InvitationRefused(f"silo {silo!r}: this invitation was used; ask the coordinator for another")
        if row["key_sha256"] is None and _expired(row["expires"]):
            raise InvitationRefused(f"silo {silo!r}: this invitation expired {row['expires']}; ask for another")
        database.execute("update invitations set key_sha256 = ? where silo = ?", (key_digest(public), silo))
        return bool(row["replace"])


def unclaim(folder: Path, silo: str) -> None:
    """Make a claimed invitation good again, because the key could not be registered."""
    with transaction(folder) as database:
        database.execute("update invitations set key_sha256 = null where silo = ?", (silo,))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _expired(expires: str) -> bool:
    try:
        return datetime.now(UTC) >= datetime.fromisoformat(expires)
    except (ValueError, TypeError):
        return True
