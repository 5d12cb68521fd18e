"""`RequestLedger`: files (plain JSON lines, no hash chain) of a silo's requests, choices of rows, and their exposures.

The coordinator names runs, numbers rounds and says from which state to start, so no count that follows from what it
sends can bind it. These files only grow. A line is written before the work: a crash in between spends a request and
hides none. A request repeated word for word tells nothing new, and counts once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from silotune.distributed.silo.exposure import Exposure
from silotune.errors import InputError

REQUESTS_FILE, ROWS_FILE, EXPOSURES_FILE = "requests.jsonl", "rows.jsonl", "exposures.jsonl"
WITHHELD_FILE = "withheld.jsonl"

Why = Literal["few rows", "failed"]
"""Why work is without an answer: few rows are behind the update, or it ended in an error."""


@dataclass(frozen=True)
class RequestRecord:
    """One request: its run, kind (`round`, `final`, `score`), round, digest, and the numbers that leave for it."""

    run: str
    kind: str
    round: int
    request: str
    numbers: int = 0


@dataclass(frozen=True)
class Tally:
    """What was worked on before a request; requests that agree in everything count once.

    `known`: the request itself was worked on before. The others count local rounds, requests for the same round, scores
    of the run and of all runs, and the numbers that left.
    """

    known: bool
    rounds_in_all: int
    requests_for_round: int
    scores: int
    scores_in_all: int
    numbers_in_all: int


@dataclass(frozen=True)
class RequestLedger:
    """A silo's record of requests and choices of rows, in its own folder."""

    folder: Path

    def tally(self, record: RequestRecord) -> Tally:
        """Sum up what was worked on before a request."""
        records = {
            RequestRecord(**fields) for fields in self._lines(REQUESTS_FILE, set(RequestRecord.__dataclass_fields__))
        }
        trained = [other for other in records if other.kind != "score"]
        scored = [other for other in records if other.kind == "score"]
        return Tally(
            known=record in records,
            rounds_in_all=len(trained),
            requests_for_round=sum(
                (other.run, other.kind, other.round) == (record.run, record.kind, record.round) for other in records
            ),
            scores=sum(other.run == record.run for other in scored),
            scores_in_all=len(scored),
            numbers_in_all=sum(other.numbers for other in records),
        )

    def last_run(self) -> tuple[str, int]:
        """Return the run of the last request, and the numbers that left in it; an empty name before the first."""
        records = [
            RequestRecord(**fields) for fields in self._lines(REQUESTS_FILE, set(RequestRecord.__dataclass_fields__))
        ]
        run = records[-1].run if records else ""
        return run, sum(record.numbers for record in set(records) if record.run == run)

    def record(self, record: RequestRecord) -> None:
        """Append a request that is about to be worked on, and flush it to disk."""
        self._append(REQUESTS_FILE, asdict(record))

    def row_sets(self) -> list[dict[str, frozenset[str]]]:
        """Return the choices of rows used so far: split → digests of its rows."""
        return [
            {split: frozenset(rows) for split, rows in line["splits"].items()}
            for line in self._lines(ROWS_FILE, {"splits"})
        ]

    def record_rows(self, splits: Mapping[str, frozenset[str]]) -> None:
        """Append a choice of rows that is about to be used."""
        self._append(ROWS_FILE, {"splits": {split: sorted(rows) for split, rows in splits.items()}})

    def exposures(self) -> list[Exposure]:
        """Return the exposures of all runs that were worked on."""
        fields = set(Exposure.__dataclass_fields__)
        lines = self._lines(EXPOSURES_FILE, fields, fields - {"batches"})  # earlier versions had full batches alone
        return [Exposure(**(line | {"phases": tuple(map(tuple, line["phases"]))})) for line in lines]

    def record_exposure(self, exposure: Exposure) -> None:
        """Append the exposure of a run that is about to be worked on."""
        self._append(EXPOSURES_FILE, asdict(exposure))

    def withheld(self) -> dict[tuple[str, str], Why]:
        """Return run and digest of the requests that trained or scored without an answer, and why."""
        fields = {"run", "request", "why"}
        lines = self._lines(WITHHELD_FILE, fields, fields - {"why"})  # earlier versions recorded few rows alone
        return {(line["run"], line["request"]): line.get("why", "few rows") for line in lines}

    def record_withheld(self, record: RequestRecord, why: Why) -> None:
        """Append a request whose work was done, and whose answer does not leave; once."""
        if (record.run, record.request) not in self.withheld():
            self._append(WITHHELD_FILE, {"run": record.run, "request": record.request, "why": why})

    def _lines(self, name: str, keys: set[str], older: set[str] | None = None) -> Iterator[dict[str, Any]]:
        try:
            for line in (self.folder / name).read_text(encoding="utf-8").splitlines():
                fields = json.loads(line)
                if fields.keys() not in (keys, older):
                    raise ValueError(f"keys must be {sorted(keys)}")
                yield fields
        except FileNotFoundError:
            return
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise InputError(f"policy: the record of what was answered cannot be read ({name})") from error

    def _append(self, name: str, fields: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")
            file.flush()
            os.fsync(file.fileno())
