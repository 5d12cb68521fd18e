"""`PrivacyLedger`: the file with a line for each noised reply of a silo, over all runs; ε spent so far.

The coordinator chooses the state that a silo starts from, so it could rewind a count kept in that state. This file only
grows. A line is written before its reply leaves: a crash between the two spends a round's ε and hides none.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from silotune.errors import InputError
from silotune.training.client import PrivacySpent

if TYPE_CHECKING:
    from silotune.communication.privacy.budget import Privacy


FILE = "released.jsonl"


@dataclass(frozen=True)
class Price:
    """The privacy cost of one noised reply; an accountant composes only replies of the same price."""

    mechanism: str
    epsilon: float
    delta: float

    @classmethod
    def of(cls, privacy: Privacy) -> Price:
        """Return the price of a reply under a configuration's guarantee."""
        return cls(privacy.account.mechanism, privacy.epsilon_round, privacy.account.delta)


@dataclass(frozen=True)
class PrivacyLedger:
    """A silo's record of noised replies, in its own folder."""

    folder: Path

    def spent(self, run: str, price: Price) -> PrivacySpent:
        """Sum up what was spent.

        Returns:
            The number of noised replies in a run at this price, and the ε of all others over the same rows (plain sum).
        """
        path = self.folder / FILE
        uses, others = 0, 0.0
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if entry["run"] == run and entry.items() >= asdict(price).items():
                    uses += 1
                else:
                    others += float(entry["epsilon"])
        except FileNotFoundError:
            return PrivacySpent()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"privacy: the record of what was released cannot be read ({FILE})") from error
        return PrivacySpent(uses, others)

    def total(self) -> float:
        """Return the ε of all replies over the same rows (plain sum)."""
        return self.spent("", Price("", 0.0, 0.0)).epsilon

    def record(self, run: str, answer: str, price: Price) -> None:
        """Append a noised reply that is about to leave, and flush it to disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": run, "answer": answer, **asdict(price)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
