"""`Invitation`, the file for a silo, and `InvitationBook` of the coordinator, which keeps hashes of tokens."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from silotune.config.validators import NAME_RULE, is_name
from silotune.core.files import read_json, write_text
from silotune.deploy.certificates import fingerprint
from silotune.deploy.node_keys import PREFIX, registered_nodes
from silotune.deploy.owned_files import like, require_absent, write_new
from silotune.deploy.party_configs import CoordinatorSettings
from silotune.errors import InputError

DAYS = 7.0
"""Days for which an invitation is valid."""

_FORMAT = 1


class InvitationRefused(InputError):
    """The token is not one that may register a key now."""


@dataclass(frozen=True)
class Invitation:
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

    silo: str
    superlink: str
    token: str
    expires: str
    fingerprint: str
    ca: str
    invitation: int = _FORMAT

    def write(self, path: Path) -> None:
        """Write a file that must not exist, for its owner alone."""
        write_new(path, json.dumps(asdict(self), indent=1) + "\n", 0o600)

    @classmethod
    def read(cls, path: Path) -> Invitation:
        """Read an invitation's file."""
        try:
            fields = read_json(path)
        except OSError as error:
            raise InputError(f"invitation {path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise InputError(f"invitation {path}: is none, or is damaged ({error})") from error
        expected = {"silo", "superlink", "token", "expires", "fingerprint", "ca"}
        if fields.get("invitation") != _FORMAT:
            raise InputError(f"invitation {path}: is none that this version reads (format {_FORMAT})")
        if fields.keys() - {"invitation"} != expected or not all(isinstance(fields[key], str) for key in expected):
            raise InputError(f"invitation {path}: is damaged; ask for another")
        found = cls(**fields)
        host, colon, port = found.superlink.rpartition(":")
        if not is_name(found.silo) or not (host and colon and port.isdigit() and 1 <= int(port) <= 65535):
            raise InputError(f"invitation {path}: is damaged (silo or superlink); ask for another")
        if fingerprint(found.ca.encode()) != found.fingerprint:
            raise InputError(f"invitation {path}: its certificate is not that of its fingerprint; ask for another")
        if found.has_expired():
            raise InputError(f"invitation {path}: expired {found.expires}; ask the coordinator for another")
        return found

    def has_expired(self) -> bool:
        """Return whether its time is over, by this machine's clock."""
        return _expired(self.expires)


def invite(
    settings: CoordinatorSettings, silo: str, path: Path, days: float = DAYS, replace: bool = False
) -> Invitation:
    """Write an invitation for a silo, and note its token's hash; an earlier one of the same silo is void.

    Args:
        settings: the coordinator's.
        silo: the silo's name.
        path: the file to write.
        days: how long it is valid.
        replace: the silo has a key already, which the new one replaces.
    """
    if not is_name(silo) or silo.startswith(PREFIX):
        raise InputError(f"silo {silo!r} cannot be a name; allowed: {NAME_RULE}, not beginning with {PREFIX!r}")
    if settings.ca is None or settings.public_address is None or settings.enrollment_port is None:
        raise InputError("invite: set public_address (HOST:PORT) and enrollment_port in the coordinator's file")
    if not 0 < days <= 90:
        raise InputError(f"--days {days:g}: allowed: more than 0, at most 90")
    admitted = silo in registered_nodes(settings)
    if admitted and not replace:
        raise InputError(f"silo {silo!r}: is admitted already; --replace invites it to register a new key instead")
    require_absent([path], "remove it, or name another with --out")
    try:
        authority = Path(settings.ca).read_bytes()
    except OSError as error:
        raise InputError(f"ca {settings.ca}: cannot be read ({error.strerror})") from error
    token = secrets.token_urlsafe(32)
    expires = (datetime.now(UTC) + timedelta(days=days)).isoformat(timespec="seconds")
    invitation = Invitation(
        silo, settings.public_address, token, expires, fingerprint(authority), authority.decode("ascii")
    )
    InvitationBook(Path(settings.folder)).add(silo, token, expires, replace)
    invitation.write(path)
    return invitation


class InvitationBook:
    """The coordinator's `invitations.json`: by silo the hash of its token, the expiry, and which key used it.

    Args:
        folder: the coordinator's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "invitations.json"

    def add(self, silo: str, token: str, expires: str, replace: bool) -> None:
        """Note an invitation; the silo's earlier one is void."""
        with self._locked() as book:
            book[silo] = {"token_sha256": _digest(token), "expires": expires, "replace": replace, "key_sha256": None}

    @contextmanager
    def claim(self, silo: str, token: str, key: bytes) -> Iterator[ClaimedInvitation]:
        """Hold a silo's invitation while its key is registered; it counts as used if the block raises nothing.

        The same key may claim it again: the answer to the first time may have been lost.

        Raises:
            InvitationRefused: no such invitation, or expired, or used by another key.
        """
        with self._locked() as book:
            entry = book.get(silo)
            expected = entry["token_sha256"] if entry else _digest("")
            if not hmac.compare_digest(expected, _digest(token)) or entry is None:
                raise InvitationRefused(f"silo {silo!r}: no such invitation; ask the coordinator for another")
            used = entry["key_sha256"]
            if used is not None and used != _digest(key):
                raise InvitationRefused(f"silo {silo!r}: this invitation was used; ask the coordinator for another")
            if used is None and _expired(entry["expires"]):
                raise InvitationRefused(f"silo {silo!r}: this invitation expired {entry['expires']}; ask for another")
            yield ClaimedInvitation(bool(entry["replace"]), used is not None)
            entry["key_sha256"] = _digest(key)

    @contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        """Read the book, and write it if the block raises nothing; other processes and threads wait."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = self._path.with_name(".invitations.lock")
        with lock.open("a") as held:
            like(self._path.parent, lock)
            fcntl.flock(held, fcntl.LOCK_EX)
            try:
                book = read_json(self._path)
            except FileNotFoundError:
                book = {}
            except (OSError, ValueError) as error:
                raise InputError(f"{self._path}: damaged ({error})") from error
            before = json.dumps(book)
            yield book
            if json.dumps(book) != before:
                write_text(self._path, json.dumps(book, indent=1, sort_keys=True) + "\n")
                self._path.chmod(0o600)
                like(self._path.parent, self._path)


@dataclass(frozen=True)
class ClaimedInvitation:
    """What a valid token allows.

    Args:
        replace: the silo's registered key, if it has one, makes way.
        done: this key claimed the invitation before.
    """

    replace: bool
    done: bool


def _digest(secret: str | bytes) -> str:
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).hexdigest()


def _expired(expires: str) -> bool:
    with contextlib.suppress(ValueError, TypeError):
        return datetime.now(UTC) >= datetime.fromisoformat(expires)
    return True
