"""Numbers beside tensors: which of them a silo sends, and which a coordinator takes from a silo that may lie."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, TypeAdapter, ValidationError

from silotune.config.schema import Figure
from silotune.data.tasks import metric_range
from silotune.methods.step import EVENT_KEYS

COUNTS = ("rows", "steps", "skipped_steps")
"""Training metrics that follow from a silo's row count; shared only where `rows` is."""

TOKENS = ("real_tokens", "padded_tokens")
"""Training metrics that tell how long rows are, which nobody asked for: they never leave a silo."""

_SCORES = ("validation", "test")

_SPLITS = {"train", "validation", "test"}

_MOST_NUMBERS = 100

_LARGEST = 2**53

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def filter_metrics(metrics: Mapping[str, Any], share: Collection[str]) -> dict[str, Any]:
    """Return the training metrics that the silo shares; a metric of an unknown name is shared if losses are."""
    kinds = {"seconds": "seconds", **dict.fromkeys(COUNTS, "rows")}
    return {name: value for name, value in metrics.items() if name not in TOKENS and kinds.get(name, "loss") in share}


def filter_scores(scores: Mapping[str, Any], share: Collection[str]) -> dict[str, Any]:
    """Return the scores and row counts that the silo shares."""
    return {name: value for name, value in scores.items() if name in (*_SCORES, "rows") and name in share}


def validate_metrics(metrics: object) -> bool:
    """Return whether a reply's metrics are finite numbers under names that events do not use otherwise."""
    if not isinstance(metrics, dict) or len(metrics) > _MOST_NUMBERS:
        return False
    for name, value in metrics.items():
        is_count = name in COUNTS or name == "seconds"
        if not _NAME.fullmatch(str(name)) or (name in EVENT_KEYS and not is_count and name != "loss"):
            return False
        if type(value) not in (int, float) or not abs(value) <= _LARGEST or (is_count and value < 0):
            return False
    return True


def score_range(metrics: Collection[str]) -> tuple[float, float]:
    """Return the smallest and the largest score that one of these metrics can give."""
    ranges = [metric_range(metric) for metric in metrics]
    return min(least for least, _ in ranges), min(_LARGEST, max(most for _, most in ranges))


def validate_scores(entry: object, ranges: Mapping[str, tuple[float, float]] = {}) -> bool:
    """Return whether an entry has only row counts, and scores that are None or in `ranges` (0 to 100 if not there)."""
    if not isinstance(entry, dict) or not entry.keys() <= {*_SCORES, "rows"}:
        return False
    rows = entry.get("rows")
    for split in _SCORES:
        score, (least, most) = entry.get(split), ranges.get(split, (0, 100))
        if score is not None and not (type(score) in (int, float) and least <= score <= most):
            return False
    if rows is None:
        return True
    counts = rows.values() if isinstance(rows, dict) and rows.keys() == _SPLITS else [None]
    return all(type(count) is int and 0 <= count <= _LARGEST for count in counts)


LEAST_COUNT = 10
"""A smaller count of a survey leaves as `HIDDEN`."""

HIDDEN = f"< {LEAST_COUNT}"

_Count = Annotated[int, Field(ge=LEAST_COUNT, le=_LARGEST, strict=True)] | Literal["< 10"]

Surveyed = dict[Figure, list[tuple[str, _Count]]]
"""Figure → its bins, each with a count or `HIDDEN`."""


def read_survey(fields: object) -> Surveyed | None:
    """Parse the counts of a silo's rows; None if it sent none, or something else."""
    try:
        return _SURVEYED.validate_python(fields)
    except ValidationError:
        return None


@dataclass(frozen=True)
class SiloStatus:
    """A silo's state of operation; None where it is not known.

    Args:
        rows_fingerprint: changes whenever the rows in use change; says nothing else about them.
        epsilon_left: ε of the operator's budget that no run has spent; None without a budget.
    """

    rows_fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")] | None = None
    epsilon_left: Annotated[float, Field(ge=0, le=_LARGEST, strict=True)] | None = None
    disk_free_bytes: Annotated[StrictInt, Field(ge=0, le=2**63)] | None = None

    def fields(self) -> dict[str, Any]:
        """Return plain values for a frame."""
        return asdict(self)

    @classmethod
    def read(cls, fields: object) -> SiloStatus | None:
        """Parse a silo's status; None if it sent none, or something else."""
        try:
            return _STATUS.validate_python(fields)
        except ValidationError:
            return None


_STATUS = TypeAdapter(SiloStatus)
_SURVEYED: TypeAdapter[Surveyed] = TypeAdapter(Surveyed)
