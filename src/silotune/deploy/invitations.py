"""Invitations: the file with which a silo registers its key once, and the coordinator's book of their tokens."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from silotune.config.validators import Address, Name
from silotune.core.files import read_json
from silotune.deploy.certificates import fingerprint
from silotune.deploy.files import require_absent, write_new
from silotune.deploy.nodes import check_silo_name, key_digest, registered_nodes, transaction
from silotune.deploy.settings import CoordinatorSettings
from silotune.errors import InputError, file_errors

DAYS = 7.0
"""Days for which an invitation is valid."""


class InvitationRefused(InputError):
    """The token cannot register a key: it is unknown, used or expired."""


class Invitation(BaseModel):
    """The content of an invitation's file, which is secret until it is used.

    Args:
        silo: the silo's name.
        superlink: HOST:PORT of the coordinator's proxy.
        token: what registers one key, once.
        expires: UTC, ISO 8601.
        fingerprint: sha256 of the authority's certificate, to be compared over another channel.
        ca: the authority's certificate, PEM.
        invitation: number of this format.
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
                found = cls.model_validate(read_json(path))
        except ValueError as error:
            raise InputError(f"invitation {path}: is damaged, or of another version; ask for another") from error
        if fingerprint(found.ca.encode()) != found.fingerprint:
            raise InputError(f"invitation {path}: its certificate is not that of its fingerprint; ask for another")
        if _expired(found.expires):
            raise InputError(f"invitation {path}: expired {found.expires}; ask the coordinator for another")
        return found


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
    made = Invitation(
        silo=silo,
        superlink=settings.public_address,
        token=token,
        expires=expires,
        fingerprint=fingerprint(authority),
        ca=authority.decode("ascii"),
    )
    note(Path(settings.folder), silo, token, expires, replace)
    write_new(path, made.model_dump_json(indent=1) + "\n", 0o600)
    return made


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
