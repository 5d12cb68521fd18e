"""Hold what a comparison asks: reference, margin and primary comparison, fixed before its runs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from silotune.core.files import write_text
from silotune.errors import InputError
from silotune.lab.report.entries import COMPARISON_FILE

MARGIN = 1.0


@dataclass(frozen=True)
class JudgingPlan:
    """What a comparison asks, fixed before its runs.

    Args:
        against: the reference; empty: `local` if it is an entry, else the first entry.
        margin: a difference smaller than this, in points, does not matter.
        claim: what the experiment is to show, in words.
        primary: the one entry whose comparison is not corrected for the others.
        metric: judge by this metric of the test rows; empty: by each silo's own.
        looks: numbers of seeds after which the results may be looked at.
        seen: numbers of seeds after which tables were written.
        remarks: what the sweeps that chose values leave open (`sweep_remarks`).
    """

    against: str = ""
    margin: float = MARGIN
    claim: str = ""
    primary: str = ""
    metric: str = ""
    looks: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> JudgingPlan | None:
        """Return the plan in a comparison's folder; None where there is none, as beside runs of older versions."""
        try:
            fields = json.loads((folder / COMPARISON_FILE).read_text(encoding="utf-8"))["judging"]
            looks, seen = (tuple(fields.pop(key)) for key in ("looks", "seen"))
            return cls(**fields | {"looks": looks, "seen": seen, "remarks": tuple(fields.get("remarks", ()))})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def fields(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return asdict(self)

    def settled(self, earlier: JudgingPlan | None) -> JudgingPlan:
        """Return this plan with the looks of an earlier one, whose primary comparison and looks stay as they were.

        Raises:
            InputError: primary or looks were named, or changed, after tables were written.
        """
        if earlier is None:
            return self
        for key in ("primary", "looks"):
            before, now = getattr(earlier, key), getattr(self, key)
            if earlier.seen and now != before:
                raise InputError(
                    f"compare.{key}: was {before or 'not named'} when tables were written; allowed: the same"
                )
        return replace(self, seen=earlier.seen)

    def look(self, folder: Path, seeds: int) -> None:
        """Record that tables of so many seeds were written."""
        path = folder / COMPARISON_FILE
        content = json.loads(path.read_text(encoding="utf-8"))
        content["judging"] = self.fields() | {"seen": sorted({*self.seen, seeds})}
        write_text(path, json.dumps(content, indent=1) + "\n")
