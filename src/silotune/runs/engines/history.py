"""Keep counters and scores of a run, and choose its best round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields

Scores = dict[str, float | None]
"""Reported silo → score in percent or loss, None without rows; `global` is the only key if all share the same rows."""


@dataclass
class History:
    """The run's counters and scores so far; stored in every checkpoint."""

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
    """The last round if it is not judged yet (`Engine.scores_deferred`); otherwise 0."""
    pending_silos: list[str] = field(default_factory=list)
    """The silos whose updates made the pending round."""
    taken: dict[str, str] = field(default_factory=dict)
    """Silo → the name of its last state in its own folder, if silos keep their own states."""

    def __post_init__(self) -> None:
        """Check what a checkpoint says.

        Raises:
            TypeError: a value is of another kind than it begins with.
        """
        for each in fields(self):
            usual = each.default if each.default_factory is MISSING else each.default_factory()
            value = getattr(self, each.name)
            names = not isinstance(value, list) or all(type(name) is str for name in value)
            if not names or not isinstance(value, (int, float) if type(usual) is float else type(usual)):
                raise TypeError(f"{each.name}: {value!r:.60}")

    @property
    def samples_per_second(self) -> float | None:
        """Rows trained per second of training; None if no silo discloses both."""
        return round(self.training_rows / self.training_seconds, 2) if self.training_seconds else None

    def count_training(self, metrics: Mapping[str, float | None]) -> None:
        """Add a silo's seconds and rows of training, unless it keeps one of them to itself."""
        seconds, rows = metrics["seconds"], metrics["rows"]
        if seconds is not None and rows is not None:
            self.training_seconds += seconds
            self.training_rows += int(rows)


def is_better(scores: Scores, mean: float, best: Scores, best_mean: float, lower: bool = False) -> bool:
    """Return whether a round is better than the best one so far.

    If the same silos were judged in both rounds, the higher mean wins (`lower`: the lower one). If a silo was absent
    from one of them, only silos judged in both count, so that a round does not win because hard silos are missing; and
    a round judged by more silos replaces one judged by a subset of them.

    Args:
        scores: the round's scores.
        mean: the mean of these scores; without scores the round's number.
        best: the best round's scores; empty before the first judgment.
        best_mean: the mean of these scores.
        lower: whether lower scores are better; without scores, the later round is better either way.
    """
    sign = -1.0 if lower else 1.0
    judged = {name for name, value in scores.items() if value is not None}
    judged_then = {name for name, value in best.items() if value is not None}
    if judged == judged_then:
        return sign * mean > sign * best_mean if judged else mean > best_mean
    if judged > judged_then:
        return True
    both = sorted(judged & judged_then)
    now, then = (math.fsum(of[name] or 0.0 for name in both) for of in (scores, best))
    return sign * now > sign * then
