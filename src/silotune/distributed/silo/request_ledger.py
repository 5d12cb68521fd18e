"""The silo's record of requests that it worked on (`requests.jsonl`), from which its caps are counted.

The coordinator names runs, numbers rounds and says from which state to start, so no count that follows from what it
sends can bind it. This file only grows. A line is written before the work: a crash in between spends a request and
hides none. A request repeated word for word tells nothing new, and counts once.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from silotune.distributed.silo.policy import Tally
from silotune.errors import InputError

REQUESTS_FILE = "requests.jsonl"


@dataclass(frozen=True)
class RequestRecord:
    """One request: its run, kind (`round`, `final`, `score`), round, digest, and the numbers that leave for it."""

    run: str
    kind: str
    round: int
    request: str
    numbers: int = 0


@dataclass(frozen=True)
class RequestLedger:
    """A silo's record of requests, in its own folder."""

    folder: Path

    def tally(self, record: RequestRecord) -> Tally | None:
        """Sum up what was worked on before a request; None if this very request was."""
        records = set(self._records())
        if record in records:
            return None
        same = (record.run, record.kind, record.round)
        return Tally(
            requests_in_all=len(records),
            requests_for_round=sum((other.run, other.kind, other.round) == same for other in records),
            numbers_in_all=sum(other.numbers for other in records),
        )

    def last_run(self) -> tuple[str, int]:
        """Return the run of the last request, and the numbers that left in it; an empty name before the first."""
        records = self._records()
        run = records[-1].run if records else ""
        return run, sum(record.numbers for record in set(records) if record.run == run)

    def record(self, record: RequestRecord) -> None:
        """Append a request that is about to be worked on, and flush it to disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / REQUESTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _records(self) -> list[RequestRecord]:
        try:
            lines = (self.folder / REQUESTS_FILE).read_text(encoding="utf-8").splitlines()
            return [RequestRecord(**json.loads(line)) for line in lines]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"policy: the record of what was answered cannot be read ({REQUESTS_FILE})") from error
