"""A run's numbers so far, and which round is the best."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Scores = dict[str, float | None]
"""Reported silo (or `global`, where all are judged on the same rows) → score in percent; None without rows."""


@dataclass
class History:
    """The run's numbers so far; stored in every checkpoint."""

    best_round: int = 0
    best_validation: float = float("-inf")
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    training_rows: int = 0
    validation: Scores = field(default_factory=dict)
    best_scores: Scores = field(default_factory=dict)
    """The validation scores of the best round."""
    sampled: list[str] = field(default_factory=list)
    pending: int = 0
    """The last round, where it is still to be judged (`Engine.scores_deferred`),"""
    pending_silos: list[str] = field(default_factory=list)
    """and who took part in it."""
    taken: dict[str, str] = field(default_factory=dict)
    """Where silos keep their own state: silo → its name there of the state it ended with."""


def is_better(found: Scores, mean: float, best: Scores, best_mean: float) -> bool:
    """Whether a round is better than the best one so far.

    Where all silos are judged in every round: whether the mean of its scores is higher. A silo may be absent when
    others are judged: a round must not win by missing the hard ones. So only silos judged in both rounds count, and a
    round that was judged by more silos replaces one that was judged by a part of them.

    Args:
        found: the round's scores.
        mean: their mean; the round's number where there are none.
        best: the best round's scores; empty before one was judged.
        best_mean: their mean.
    """
    here = {name for name, value in found.items() if value is not None}
    there = {name for name, value in best.items() if value is not None}
    if here == there:
        return mean > best_mean
    if here > there:
        return True
    both = sorted(here & there)
    return math.fsum(found[name] or 0.0 for name in both) > math.fsum(best[name] or 0.0 for name in both)
