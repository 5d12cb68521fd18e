"""Everything that a silo keeps: states, last answers, counts over all runs, decisions of its operator, the audit log.

One SQLite file holds it all but the tensors of states, which are files beside it: `<folder>/<run>/0003.safetensors` is
the state after round 3, or `0003-final` after the method's final phases. The file is written first, under another name;
the transaction that records an answer also records the digest of its state, its price and its line in the audit log;
then the file gets its name. A kill anywhere in between leaves either the old answer with its state, or the new ones.

The coordinator names runs, numbers rounds and says from which state to start, so no count that follows from what it
sends can bind it: `requests` and `released` only grow.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silotune.core.files import file_sha256
from silotune.core.records import FILE, Records
from silotune.core.serialization import read_tensor_file, write_tensor_file
from silotune.core.tensors import Tensors
from silotune.distributed.protocol.frames import RUN_ID, Frame, check_run_id, decode
from silotune.distributed.silo import mask_ledger, row_ledger, withdrawn_rows
from silotune.distributed.silo.policy import Policy, Request
from silotune.distributed.silo.row_ledger import Charge, RowLedger
from silotune.distributed.silo.silo_config import RowBudget
from silotune.distributed.silo.withdrawn_rows import Marks, note_use
from silotune.errors import InputError
from silotune.training.client import PrivacySpent

if TYPE_CHECKING:
    from silotune.communication.privacy.accountant import Privacy

_STATE_NAME = re.compile(r"\d{4,}(-final)?")

TABLES = """
CREATE TABLE IF NOT EXISTS requests (run TEXT, kind TEXT, round INTEGER, digest TEXT, numbers INTEGER,
    UNIQUE (run, kind, round, digest));
CREATE TABLE IF NOT EXISTS answers (run TEXT, name TEXT, round INTEGER, asked TEXT, frame BLOB, about TEXT, state TEXT,
    PRIMARY KEY (run, name));
CREATE TABLE IF NOT EXISTS released (run TEXT, mechanism TEXT, epsilon REAL, delta REAL);
CREATE TABLE IF NOT EXISTS row_use (run TEXT, configuration TEXT, rows TEXT);
"""

_NO_MARKS: Marks = {}


@dataclass(frozen=True)
class Price:
    """The privacy cost of one noised answer; an accountant composes only answers of the same price."""

    mechanism: str
    epsilon: float
    delta: float

    @classmethod
    def of(cls, privacy: Privacy) -> Price:
        """Return the price of an answer under a configuration's guarantee."""
        return cls(privacy.account.mechanism, privacy.epsilon_round, privacy.account.delta)


@dataclass(frozen=True)
class SiloAnswer:
    """A silo's answer with its record for the audit log.

    Args:
        frame: the answer with all numbers, also those that the operator does not share.
        about: what the audit log says beside the frame.
        name: the name under which it is kept for repeated requests; empty if it is not.
        request_key: fields in which a repeated request has to agree.
        state: the silo's new state, if there is one.
        keep: names of earlier states that are still needed.
    """

    frame: Frame
    about: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    round: int = 0
    request_key: Mapping[str, str] = field(default_factory=dict)
    state: Tensors | None = None
    price: Price | None = None
    charge: Charge | None = None
    keep: Collection[str] = ()


class SiloStore:
    """The records and states of one silo.

    Args:
        policy: caps what is written; None: nothing does.
        budget: of noise on rows; None: it is recorded without a limit.
    """

    def __init__(self, folder: Path, policy: Policy | None = None, budget: RowBudget | None = None) -> None:
        self.folder = folder
        self.records = Records(folder, TABLES + row_ledger.TABLES + withdrawn_rows.TABLES + mask_ledger.TABLES)
        self.ledger = RowLedger(self.records, budget)
        self._policy = policy

    # -- answers and states --------------------------------------------------------------------------------------------

    def find(self, run: str, name: str, request_key: Mapping[str, str]) -> SiloAnswer | None:
        """Return the answer that is kept for the same request; None if there is none, or if its state is missing."""
        answer = self.answer_of(run, name)
        return answer[1] if answer is not None and answer[0] == request_key else None

    def answer_of(self, run: str, name: str) -> tuple[dict[str, str], SiloAnswer] | None:
        """Return the answer that is kept under a name, after the fields of its request; None as `find`."""
        query = "SELECT asked, frame, about, state FROM answers WHERE run = ? AND name = ?"
        for request_key, frame, about, state in self.records.rows(query, run, name):
            if state is None or self._state_file(run, name, state) is not None:
                return json.loads(request_key), SiloAnswer(decode(frame), json.loads(about))
        return None

    def erase_blob(self, run: str, blob: str) -> None:
        """Remove a blob from all kept answers of a run."""
        with self.records.transaction() as connection:
            for name, data in self.records.rows("SELECT name, frame FROM answers WHERE run = ?", run):
                frame = decode(data)
                if frame.blobs.pop(blob, None) is not None:
                    change = "UPDATE answers SET frame = ? WHERE run = ? AND name = ?"
                    connection.execute(change, (frame.encode(), run, name))

    def commit(self, run: str, answer: SiloAnswer, line: Mapping[str, Any]) -> None:
        """Record an answer that is about to leave, in one transaction."""
        if self._policy is not None:  # refusals have lines, too, and a coordinator can ask without end
            self._policy.check_disk(_used(self.records.path), 0)
        new, digest = None, None
        if answer.state is not None:
            new = self._path(run, answer.name, ".new")
            self.make_folder(run)
            digest = write_tensor_file(new, answer.state)
        outdated: list[str] = []
        with self.records.transaction() as connection:
            if answer.name:
                self.make_folder(run)
                there = self.records.rows("SELECT DISTINCT run FROM answers")
                gone = [row for row in there if not (self.folder / row[0]).is_dir()]  # their operator cleaned up
                connection.executemany("DELETE FROM answers WHERE run = ?", gone)
                earlier = "SELECT name FROM answers WHERE run = ? AND round < ?"
                names = {name for (name,) in connection.execute(earlier, (run, answer.round))}
                outdated = sorted(names - {*answer.keep}) if new is not None else []
                connection.executemany("DELETE FROM answers WHERE run = ? AND name = ?", [(run, n) for n in outdated])
                connection.execute(
                    "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (run, answer.name, answer.round, json.dumps(dict(answer.request_key)), answer.frame.encode(),
                     json.dumps(dict(answer.about)), digest),
                )  # fmt: skip
            if answer.price is not None:
                connection.execute("INSERT INTO released VALUES (?, ?, ?, ?)", (run, *astuple(answer.price)))
            if answer.charge is not None:
                self.ledger.charge(answer.charge)
            self.records.append(line)
        if new is not None:
            new.replace(self._path(run, answer.name))
        for name in outdated:
            self._path(run, name).unlink(missing_ok=True)

    def read_state(self, run: str, name: str) -> Tensors:
        """Return the tensors of a state."""
        digest, file = self.state_digest(run, name), self._path(run, name)
        self._state_file(run, name, digest)  # completes an interrupted write
        try:
            return read_tensor_file(file.parent, file.name, {file.name: digest})
        except InputError as error:  # the coordinator reads it, too: no paths of this machine
            raise InputError(f"state {name!r} of this silo: missing or damaged") from error

    def state_digest(self, run: str, name: str) -> str:
        """Return the sha256 of a state's file."""
        if not _STATE_NAME.fullmatch(name):
            raise InputError(f"state {name[:40]!r}: no name of a state")
        rows = self.records.rows("SELECT state FROM answers WHERE run = ? AND name = ?", run, name)
        if not rows or rows[0][0] is None:
            raise InputError(f"state {name!r} of this silo: missing or damaged (no record of it)")
        return str(rows[0][0])

    def made_by(self, run: str, name: str, recipe: str) -> str:
        """Return the kind of request that made a state; empty if it ran under another configuration than `recipe`."""
        rows = self.records.rows("SELECT asked FROM answers WHERE run = ? AND name = ?", run, name)
        request_key = json.loads(rows[0][0]) if rows else {}
        return str(request_key["kind"]) if request_key.get("recipe") == recipe else ""

    def _state_file(self, run: str, name: str, digest: str) -> Path | None:
        """Return a state's file if its content matches the record; first complete an interrupted write."""
        for path in (self._path(run, name), self._path(run, name, ".new")):
            with suppress(OSError):
                if file_sha256(path) == digest:
                    return path.replace(self._path(run, name))
        return None

    def _path(self, run: str, name: str, more: str = "") -> Path:
        return self.run_folder(run) / f"{name}.safetensors{more}"

    def run_folder(self, run: str) -> Path:
        """Return the folder of a run's files."""
        check_run_id(run)
        return self.folder / run

    def make_folder(self, run: str) -> Path:
        """Make the folder of a run's files, for the operator alone."""
        path = self.run_folder(run)
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
        return path

    def require_room(self, more: int) -> None:
        """Refuse to write more bytes than the policy's cap allows."""
        if self._policy is not None:
            runs = [path for path in self.folder.glob("*") if RUN_ID.fullmatch(path.name)]
            self._policy.check_disk(sum(map(_used, [*runs, self.folder / FILE])), more)

    # -- counts over all runs ------------------------------------------------------------------------------------------

    def count(
        self,
        request: Request,
        row_use: tuple[str, str],
        backbone: int,
        rounds: int,
        marks: Marks = _NO_MARKS,
        before: str = "",
    ) -> None:
        """Record a request before it is worked on, with the rows that it uses: a crash spends it and hides none."""
        with self.records.transaction() as connection:
            query = "SELECT 1 FROM requests WHERE run = ? AND kind = ? AND round = ? AND digest = ?"
            if not self.records.rows(query, request.run, request.kind, request.round, request.digest):
                if self._policy is not None:
                    same = "SELECT COUNT(*) FROM requests WHERE run = ? AND kind = ? AND round = ?"
                    ((again,),) = self.records.rows(same, request.run, request.kind, request.round)
                    sums = "SELECT COUNT(*), COALESCE(SUM(numbers), 0) FROM requests"
                    ((requests, numbers),) = self.records.rows(sums)
                    self._policy.check_request(request, (requests, again, numbers), backbone, rounds)
                connection.execute("INSERT INTO requests VALUES (?, ?, ?, ?, ?)", astuple(request))
            if self.rows_used(request.run, row_use[0])[-1:] != [row_use[1]]:
                connection.execute("INSERT INTO row_use VALUES (?, ?, ?)", (request.run, *row_use))
                note_use(self.records, request.run, marks, before)

    def require_total(self, runs: Collection[str], numbers: int, requests: int, backbone: int) -> None:
        """Refuse runs whose numbers and requests would, with those of all other runs, exceed the caps."""
        if self._policy is not None:
            query = "SELECT run, COUNT(*), COALESCE(SUM(numbers), 0) FROM requests GROUP BY run"
            others = [row for row in self.records.rows(query) if row[0] not in runs]
            before = sum(row[1] for row in others), sum(row[2] for row in others)
            self._policy.check_total(before[0] + requests, before[1] + numbers, backbone)

    def rows_used(self, run: str, configuration: str) -> list[str]:
        """Return the digests of the rows with which a run was worked on, oldest first."""
        query = "SELECT rows FROM row_use WHERE run = ? AND configuration = ? ORDER BY rowid"
        return [rows for (rows,) in self.records.rows(query, run, configuration)]

    def spent(self, run: str, price: Price | None = None) -> PrivacySpent:
        """Return how many noised answers a run had at this price, and the plain sum of all other answers' ε."""
        uses, others = 0, 0.0
        for of_run, *rest in self.records.rows("SELECT run, mechanism, epsilon, delta FROM released"):
            if of_run == run and price is not None and Price(*rest) == price:
                uses += 1
            else:
                others += rest[1]
        return PrivacySpent(uses, others)

    def last_run(self) -> tuple[str, int]:
        """Return the run of the last request, and how many numbers left in it; an empty name before the first."""
        rows = self.records.rows("SELECT run FROM requests ORDER BY rowid DESC LIMIT 1")
        run = rows[0][0] if rows else ""
        ((numbers,),) = self.records.rows("SELECT COALESCE(SUM(numbers), 0) FROM requests WHERE run = ?", run)
        return run, numbers


def _used(path: Path) -> int:
    """Return the bytes of a file, or of the files in a folder and below it."""
    files = [path] if path.is_file() else [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total
