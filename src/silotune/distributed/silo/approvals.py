"""`Approvals`: the operator's decisions on `Request`s of runs, files by run id and configuration.

A decision belongs to a run's id and to the digest of its resolved configuration: the same name with another
configuration is another run, and waits anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from silotune.config import Config
from silotune.core.clock import utc_now
from silotune.core.files import write_text
from silotune.errors import InputError, unknown_name_error

FOLDER = "approvals"

State = Literal["pending", "approved", "rejected"]


@dataclass(frozen=True)
class Request:
    """A run that asked a silo to take part.

    Args:
        run: the run's id.
        digest: sha256 of the configuration, as `configuration_digest`.
        state: the operator's decision.
        seen: when it first asked (UTC).
        decided: when the operator decided (UTC); empty before.
        configuration: key → value of the resolved configuration.
        description: lines about the run in plain words.
    """

    run: str
    digest: str
    state: State
    seen: str
    decided: str
    configuration: Mapping[str, Any]
    description: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name by which commands know it: the run's id and the beginning of the digest."""
        return f"{self.run}-{self.digest[:12]}"


@dataclass(frozen=True)
class Approvals:
    """The decisions of one silo's operator.

    Args:
        folder: the silo's folder.
    """

    folder: Path

    def find(self, run: str, digest: str) -> Request | None:
        """Return what is known of a run with this configuration; None if it never asked."""
        found = self._read(self._path(f"{run}-{digest[:12]}"))
        return found if found is not None and found.digest == digest else None

    def all(self) -> list[Request]:
        """Return all runs that ever asked, oldest first."""
        files = sorted((self.folder / FOLDER).glob("*.json"))
        return sorted(filter(None, map(self._read, files)), key=lambda request: (request.seen, request.name))

    def ask(
        self, run: str, digest: str, configuration: Mapping[str, Any], describe: Callable[[], list[str]]
    ) -> Request:
        """Record a run that waits for its operator."""
        if (taken := self._read(self._path(f"{run}-{digest[:12]}"))) is not None and taken.digest != digest:
            raise InputError(f"approvals: another configuration is named {taken.name}; change the run's description")
        request = Request(run, digest, "pending", utc_now(), "", configuration, tuple(describe()))
        self._write(request)
        return request

    def described_anew(self, request: Request, description: Sequence[str]) -> Request:
        """Replace the description of a run that waits, if it is another one by now."""
        known = self._read(self._path(request.name)) or request  # its operator may have decided meanwhile
        if known.state != "pending" or known.description == tuple(description):
            return known
        renewed = replace(known, description=tuple(description))
        self._write(renewed)
        return renewed

    def decide(self, name: str, state: State) -> Request:
        """Record the operator's decision.

        Args:
            name: the run's name, or a beginning of it that no other run has.
            state: the decision.
        """
        request = replace(self.named(name), state=state, decided=utc_now())
        self._write(request)
        return request

    def named(self, name: str) -> Request:
        """Return the run with this name, or with a name that begins so."""
        requests = self.all()
        found = [request for request in requests if name and request.name.startswith(name)]
        if len(found) > 1:
            raise InputError(f"run {name!r}: several begin so: {', '.join(request.name for request in found)}")
        if not found:
            raise unknown_name_error("run", name, [request.name for request in requests])
        return found[0]

    def last_approved(self, before: Request) -> Request | None:
        """Return the run that was approved last, other than this one."""
        approved = [each for each in self.all() if each.state == "approved" and each.name != before.name]
        return max(approved, key=lambda request: request.decided, default=None)

    def _path(self, name: str) -> Path:
        return self.folder / FOLDER / f"{name}.json"

    def _write(self, request: Request) -> None:
        path = self._path(request.name)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(path, json.dumps(asdict(request), indent=1) + "\n")

    def _read(self, path: Path) -> Request | None:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return Request(**{**fields, "description": tuple(fields["description"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"approvals: {path.name} cannot be read; remove it, and the run asks again") from error


def configuration_of(config: Config) -> dict[str, Any]:
    """Return what an approval is bound to: all keys but how long the coordinator waits for silos."""
    tree = config.model_dump(mode="json")
    return {**tree, "federation": {"silos": tree["federation"]["silos"]}}


def configuration_digest(configuration: Mapping[str, Any]) -> str:
    """Return the sha256 of a configuration's keys and values."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()
