"""Stores the operator's decisions on runs; a new run waits until it is approved.

A decision belongs to a run's id and to the digest of its resolved configuration: the same name with another
configuration is another run, and waits for its own approval. A plan is a list of runs with one digest; a decision on it
covers each of its runs, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from silotune.config import Config
from silotune.core.clock import current_user, utc_now
from silotune.core.records import Records
from silotune.distributed.protocol.frames import WAITS_FOR_APPROVAL, HandshakeRefused
from silotune.errors import InputError, SilotuneError, unknown_name_error

State = Literal["pending", "approved", "rejected"]

MOST_WAITING = 10
"""Runs that may wait for approval at once: each is kept on disk, and a person reads them."""

PLAN = "plan"
"""Key of a plan's configuration, beside which it has no other: the id and configuration of each of its runs."""

_TABLE = """CREATE TABLE IF NOT EXISTS approvals (name TEXT PRIMARY KEY, run TEXT, digest TEXT, state TEXT, seen TEXT,
    decided TEXT, configuration TEXT, description TEXT);
CREATE TABLE IF NOT EXISTS standing (digest TEXT PRIMARY KEY, run TEXT, until TEXT, times INTEGER);"""


@dataclass(frozen=True)
class WaitingRun:
    """A run that asked a silo to take part.

    Args:
        name: the name by which commands know it: the run's id and the beginning of the digest.
        digest: sha256 of the configuration, as `configuration_digest`.
        configuration: key → value of the resolved configuration.
    """

    name: str
    run: str
    digest: str
    state: State
    seen: str
    decided: str
    configuration: Mapping[str, Any]
    description: tuple[str, ...]


class WaitsForApproval(SilotuneError):
    """A run that the silo's operator has not decided about yet."""


class Approvals:
    """The decisions of one silo's operator."""

    def __init__(self, folder: Path) -> None:
        self._records = Records(folder, _TABLE)

    def require(self, silo: str, run: str, configuration: Mapping[str, Any], describe: Callable[[], list[str]]) -> None:
        """Require that the operator approved a run; record a new one, with what `describe` tells the operator."""
        digest = configuration_digest(configuration)
        entry = self.find(run, digest)
        if entry is None:
            waiting = sum(each.state == "pending" for each in self.all())
            if waiting >= MOST_WAITING:
                raise HandshakeRefused(f"silo {silo!r}: {waiting} other runs wait for approval; no more may")
            entry = self._stands(self.ask(run, digest, configuration, describe))
        elif entry.state == "pending":  # the rows or the operator's settings may be others than when it first asked
            entry = self.described_anew(entry, describe())
        if entry.state == "rejected":
            raise HandshakeRefused(f"silo {silo!r}: its operator rejected the run {entry.name}")
        if entry.state == "pending":
            raise WaitsForApproval(f"{WAITS_FOR_APPROVAL} at {silo} (silotune silo show {entry.name})")

    def all(self) -> list[WaitingRun]:
        """Return all runs that ever asked, oldest first."""
        return self._read("ORDER BY seen, name")

    def find(self, run: str, digest: str) -> WaitingRun | None:
        """Look a configuration's run up; None if it never asked for approval."""
        return next(iter(self._read("WHERE run = ? AND digest = ?", run, digest)), None)

    def ask(
        self, run: str, digest: str, configuration: Mapping[str, Any], describe: Callable[[], list[str]]
    ) -> WaitingRun:
        """Record a run that waits for its operator."""
        name = _name(run, digest)
        if self._read("WHERE name = ?", name):
            raise InputError(f"approvals: another configuration is named {name}; change the run's description")
        entry = WaitingRun(name, run, digest, "pending", utc_now(), "", configuration, tuple(describe()))
        self._write(entry)
        return entry

    def described_anew(self, waiting: WaitingRun, description: Sequence[str]) -> WaitingRun:
        """Replace the description of a run that waits; leave one alone whose operator has decided meanwhile."""
        with self._records.transaction():
            entry = self.find(waiting.run, waiting.digest) or waiting
            if entry.state == "pending" and entry.description != tuple(description):
                entry = replace(entry, description=tuple(description))
                self._write(entry)
            return entry

    def decide(self, name: str, state: State) -> WaitingRun:
        """Record the operator's decision; a rejection also ends a standing approval of the configuration."""
        with self._records.transaction() as connection:
            decided = replace(self.named(name), state=state, decided=utc_now())
            self._write(decided)
            self._records.append({"kind": state, "run": decided.name, "user": current_user()})
            if state == "rejected":
                connection.execute("DELETE FROM standing WHERE digest = ?", (decided.digest,))
            for run, configuration in decided.configuration.get(PLAN, ()):
                digest = configuration_digest(configuration)
                part = replace(decided, run=run, digest=digest, name=_name(run, digest), configuration=configuration)
                self._write(replace(part, description=(f"of the plan {decided.name}",)))
            return decided

    def stand(self, run: WaitingRun, until: str, times: int) -> None:
        """Also approve later runs of the same configuration: so many, of those that first ask before a date (UTC)."""
        with self._records.transaction() as connection:
            standing = run.digest, run.name, until, times
            connection.execute("INSERT OR REPLACE INTO standing VALUES (?, ?, ?, ?)", standing)
            stands = {"kind": "approved", "run": run.name, "reason": f"so are {times} more runs before {until}"}
            self._records.append({**stands, "user": current_user()})

    def standing(self, digest: str = "%") -> list[tuple[str, str, int]]:
        """Return the run, the end and the number of runs left of each standing approval that holds."""
        query = "SELECT run, until, times FROM standing WHERE digest LIKE ? AND times > 0 AND until > ?"
        return [(run, until, times) for run, until, times in self._records.rows(query, digest, utc_now())]

    def _stands(self, asking: WaitingRun) -> WaitingRun:
        """Approve a run that asks for the first time, if a standing approval holds for its configuration."""
        with self._records.transaction() as connection:
            for run, until, times in self.standing(asking.digest):
                connection.execute("UPDATE standing SET times = ? WHERE digest = ?", (times - 1, asking.digest))
                line = f"approved by the standing approval of {run}: {times - 1} more runs before {until}"
                asking = replace(asking, state="approved", decided=utc_now(), description=(*asking.description, line))
                self._write(asking)
                self._records.append({"kind": "approved", "run": asking.name, "reason": line})
        return asking

    def named(self, name: str) -> WaitingRun:
        """Return the run with this name, or with a name that begins so."""
        runs = self.all()
        matches = [run for run in runs if name and run.name.startswith(name)]
        if len(matches) > 1:
            raise InputError(f"run {name!r}: several begin so: {', '.join(run.name for run in matches)}")
        if not matches:
            raise unknown_name_error("run", name, [run.name for run in runs])
        return matches[0]

    def last_approved(self, before: WaitingRun) -> WaitingRun | None:
        """Return the run that was approved last, other than this one."""
        others = [each for each in self.all() if each.name != before.name and PLAN not in each.configuration]
        approved = [each for each in others if each.state == "approved"]
        return max(approved, key=lambda run: run.decided, default=None)

    def _read(self, which: str, *values: object) -> list[WaitingRun]:
        records = self._records.rows(f"SELECT * FROM approvals {which}", *values)
        parsed = ((*row, json.loads(config), tuple(json.loads(lines))) for *row, config, lines in records)
        return [WaitingRun(*row) for row in parsed]

    def _write(self, run: WaitingRun) -> None:
        *plain, configuration, description = astuple(run)
        values = *plain, json.dumps(configuration), json.dumps(description)
        with self._records.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO approvals VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)


def _name(run: str, digest: str) -> str:
    return f"{run}-{digest[:12]}"


def approved_part(config: Config) -> dict[str, Any]:
    """Return the keys that an approval holds for: all but the coordinator's waiting times."""
    tree = config.model_dump(mode="json")
    return {**tree, "federation": {"silos": tree["federation"]["silos"]}}


def configuration_digest(configuration: Mapping[str, Any]) -> str:
    """Return the sha256 of a configuration's keys and values."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()
