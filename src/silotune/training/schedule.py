"""Compute the learning rate of every step of a phase, from `train.schedule` and `train.warmup`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from silotune.config import TrainConfig


@dataclass(frozen=True)
class Schedule:
    """Learning rates as transformers' Trainer has them: a rise from 0 over the warmup, then the schedule's fall to 0.

    Args:
        train: peak, form and warmup.
        steps: all steps of the span.
        before: the steps of the span before this phase began.
    """

    train: TrainConfig
    steps: int
    before: int = 0

    @classmethod
    def of(cls, train: TrainConfig, steps: int, number: int, rounds: int | None) -> Schedule:
        """Return the schedule of one phase of one silo.

        Args:
            train: the section `train`.
            steps: optimizer steps of the phase.
            number: the round's number.
            rounds: rounds of the run; None: the phase does not take place in each.
        """
        if train.schedule_over == "round" or rounds is None:
            return cls(train, steps)
        return cls(train, steps * rounds, steps * (number - 1))

    def rate(self, taken: int) -> float:
        """Return the learning rate of a step, given the number of earlier steps of the phase."""
        return self.train.lr * self._factor(self.before + taken)

    def _factor(self, step: int) -> float:
        rise = self.train.warmup
        warmup = math.ceil(self.steps * rise) if rise < 1 else int(rise)
        if step < warmup:
            return step / warmup
        left = max(0, self.steps - step) / max(1, self.steps - warmup)
        if self.train.schedule == "linear":
            return left
        return (1 - math.cos(math.pi * left)) / 2 if self.train.schedule == "cosine" else 1.0
