"""What a silo has paid for with privacy, for ever: one line for every noised answer it gave, in whichever run.

A coordinator names the state from which a silo goes on, so a count in that state could be rewound. This file only
grows. A line is written before its answer leaves: a crash between the two costs a round's ε, and hides none.
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
    """What one noised answer costs: an accountant composes those of one price alone."""

    mechanism: str
    epsilon: float
    delta: float

    @classmethod
    def of(cls, privacy: Privacy) -> Price:
        """Of what a configuration promises."""
        return cls(privacy.account.mechanism, privacy.epsilon_round, privacy.account.delta)


@dataclass(frozen=True)
class PrivacyLedger:
    """A silo's record, in its own folder."""

    folder: Path

    def spent(self, run: str, price: Price) -> PrivacySpent:
        """The noised answers given in a run at this price, and the ε of all others over the same rows (plain sum).

        Raises:
            InputError: if the file is damaged; without it nothing more may leave.
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

    def record(self, run: str, answer: str, price: Price) -> None:
        """One more noised answer is about to leave."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": run, "answer": answer, **asdict(price)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
