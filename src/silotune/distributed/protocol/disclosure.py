"""The numbers that a silo may say: which of them leave it, and what a coordinator takes for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from silotune.methods.base import LOGGED

COUNTS = ("rows", "steps", "real_tokens", "padded_tokens")
"""The numbers of a training that follow from how many rows a silo has."""

_SCORES = ("validation", "test")

_SPLITS = {"train", "validation", "test"}

_MOST_NUMBERS = 100

_LARGEST = 2**53

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def filter_metrics(metrics: Mapping[str, Any], share: Collection[str]) -> dict[str, Any]:
    """A training's numbers, without those that are not shared.

    Args:
        metrics: what a local round says.
        share: as `SiloSettings.share`.
    """
    kinds = {"seconds": "seconds", **dict.fromkeys(COUNTS, "rows")}
    return {name: value for name, value in metrics.items() if kinds.get(name, "loss") in share}


def filter_scores(scores: Mapping[str, Any], share: Collection[str]) -> dict[str, Any]:
    """A silo's scores and row counts, without those that are not shared."""
    return {name: value for name, value in scores.items() if name in (*_SCORES, "rows") and name in share}


def validate_metrics(said: object) -> bool:
    """Whether these are a training's numbers: finite, with names that the events do not use for something else."""
    if not isinstance(said, dict) or len(said) > _MOST_NUMBERS:
        return False
    for name, value in said.items():
        counted = name in COUNTS or name == "seconds"
        if not _NAME.fullmatch(str(name)) or (name in LOGGED and not counted and name != "loss"):
            return False
        if type(value) not in (int, float) or not abs(value) <= _LARGEST or (counted and value < 0):
            return False
    return True


def validate_scores(said: object) -> bool:
    """Whether these are scores (between 0 and 100, or missing) and row counts per split; and nothing else."""
    if not isinstance(said, dict) or not said.keys() <= {*_SCORES, "rows"}:
        return False
    scores, rows = [said.get(name) for name in _SCORES], said.get("rows")
    if not all(score is None or (type(score) in (int, float) and 0 <= score <= 100) for score in scores):
        return False
    if rows is None:
        return True
    counts = rows.values() if isinstance(rows, dict) and rows.keys() == _SPLITS else [None]
    return all(type(count) is int and 0 <= count <= _LARGEST for count in counts)
