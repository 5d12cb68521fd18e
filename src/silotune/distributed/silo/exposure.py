"""`RowUse`: what a run does with a silo's rows; `Exposure`: by how little two updates may differ in that.

Two updates of one seed, of 6 and of 7 steps, differ by the gradient of one batch, although each has many steps behind
it. While learning rates are small, the same holds for any two updates that differ by a few rows, whatever the seed,
method or batch size. So updates over the same rows have equal exposures, or differ by as much as an update must have.
Batches of another size have other rows on their borders, which `train.clip_norm` or curvature can weigh otherwise.
The number of rows enters rounded down: what depends on it leaves in refusals.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from silotune.config import TrainConfig
from silotune.data.rows import Row, Splits
from silotune.data.tokenized import TokenizedRows
from silotune.methods.phase import Phase
from silotune.training.context import TrainingContext
from silotune.training.silo import Silo

PhaseLength = tuple[Literal["epochs", "steps"], int]
"""The length of a phase as a configuration has it: its unit, and how many of them."""

_NOTHING: PhaseLength = ("steps", 0)


def rounded_rows(rows: int) -> int:
    """Round a number of rows down, to 1, 2 or 5 times a power of ten."""
    return max((step for step in _steps(rows) if step <= rows), default=0)


def _next(rows: int) -> int:
    """Return the smallest of these numbers above one."""
    return min(step for step in _steps(10 * rows + 1) if step > rows)


def _steps(up_to: int) -> list[int]:
    return [leading * 10**power for power in range(len(str(up_to))) for leading in (1, 2, 5)]


def phase_length(context: TrainingContext, phase: Phase) -> PhaseLength:
    """Return a phase's length as it is configured, which tells nothing about the rows."""
    epochs = context.epochs(phase)
    return ("steps", context.train.steps or 0) if epochs is None else ("epochs", epochs)


@dataclass(frozen=True)
class Exposure:
    """What decides how often which rows are behind an update.

    Args:
        rows: digest of the training rows.
        phases: the lengths of a round's phases.
        batch_size: rows of a step.
        max_length: tokens at which rows are cut.
        rates: how the learning rate goes over the steps, and at which norm their gradients are cut.
        batches: `train.batches`.
    """

    rows: str
    phases: tuple[PhaseLength, ...]
    batch_size: int
    max_length: int
    rates: str = "constant"
    batches: str = "full"

    @classmethod
    def of(cls, context: TrainingContext, rows: Iterable[str]) -> Exposure:
        """Return the exposure of a run's local rounds.

        Args:
            context: the run's.
            rows: digests of the training rows.
        """
        phases = tuple(
            phase_length(context, phase) for phase in context.phases if phase.when == "round" and phase.trains
        )
        digest = hashlib.sha256(" ".join(sorted(rows)).encode()).hexdigest()
        rates = _rates(context.train, context.rounds)
        return cls(
            digest[:16], phases, context.train.batch_size, context.train.max_length, rates, context.train.batches
        )

    def difference(self, other: Exposure, rows: int) -> float | None:
        """Return the fewest rows × steps that the difference of two updates over the same rows can be made of.

        Args:
            other: another update's.
            rows: the number of training rows, rounded down.

        Returns:
            None if both have seen every row equally often, in the same batches. 0 if their steps weigh otherwise: a
            warmup of one step, for example, leaves out the first batch alone.
        """
        if (self.rates, self.batches) != (other.rates, other.batches):
            return 0.0
        batch_size, alike = max(self.batch_size, other.batch_size), self.batch_size == other.batch_size
        positions = steps = 0.0
        same = True
        for (unit, count), (others_unit, others_count) in zip_longest(self.phases, other.phases, fillvalue=_NOTHING):
            if unit == others_unit == "epochs" and alike:
                apart = abs(count - others_count)
                positions, steps = positions + apart * rows, steps + apart * rows / batch_size
                same &= not apart
            elif unit == others_unit and alike:
                apart = abs(count - others_count)
                positions, steps = positions + apart * batch_size, steps + apart
                same &= not apart
            else:
                mine = self._positions((unit, count), rows)
                theirs = other._positions((others_unit, others_count), rows)
                between = max(0.0, mine[0] - theirs[1], theirs[0] - mine[1])
                positions, steps = positions + between, steps + between / batch_size
                same = False
        return None if same else min(rows, positions) * steps

    def _positions(self, length: PhaseLength, rows: int) -> tuple[float, float]:
        """Return how many rows a phase sees at least and at most, counting repetitions.

        The last batch of an epoch is smaller: n rows take up to n / batch_size + 1 steps. Even batches are all as small
        as their mean, rounded down.
        """
        unit, count = length
        if unit == "epochs":
            return count * rows, count * (_next(rows) - 1)
        mean = self.batch_size * rows / (rows + self.batch_size)
        return count * max(0.0, mean - (self.batches == "even")), count * self.batch_size


def _rates(train: TrainConfig, rounds: int) -> str:
    """Name the schedule of the learning rate, over how many rounds it goes, its warmup, and `train.clip_norm`."""
    cut = "" if train.clip_norm is None else f", cut at {train.clip_norm:g}"
    if train.steady:
        return f"constant{cut}"
    over = f"{rounds} rounds" if train.schedule_over == "run" else "a round"
    return f"{train.schedule} over {over} after {train.warmup:g}{cut}"


def _row_lengths(tasks: Collection[TokenizedRows]) -> list[int]:
    """Return the tokens of each training row, as it is cut; of a pair of answers those of the longer one."""
    lengths = []
    for rows in tasks:
        decoder = rows.decoder or [[]] * len(rows)
        for example in range(rows.examples):
            parts = rows.sequences([example])
            lengths.append(max(max(len(rows.ids[part]), len(decoder[part])) for part in parts))
    return lengths


def row_digests(rows: Iterable[Row]) -> frozenset[str]:
    """Return short digests of rows by their texts, label and answer, and by what conversations and pairs have more."""
    contents = (json.dumps(_content(row)).encode() for row in rows)
    return frozenset(hashlib.sha256(content).hexdigest()[:16] for content in contents)


def _content(row: Row) -> list[Any]:
    """Return what tells a row from others; a plain row has no further entries, as in records of earlier versions."""
    more = [row.turns, row.rejected] if row.turns or row.rejected else []
    return [row.texts, row.known, row.answer, *more]


@dataclass(frozen=True)
class RowUse:
    """What a run does with a silo's rows.

    Args:
        splits: split → digests of its rows.
        exposure: how often which of them are behind an update.
        lengths: tokens of each training row, as the run cuts them.
    """

    splits: Mapping[str, frozenset[str]]
    exposure: Exposure
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, splits: Splits, context: TrainingContext, silo: Silo) -> RowUse:
        """Return what a run with these splits does with them."""
        digests = {name: row_digests(getattr(splits, name)) for name in ("train", "validation", "test")}
        return cls(digests, Exposure.of(context, digests["train"]), tuple(_row_lengths(silo.train.values())))

    @property
    def rows(self) -> int:
        """The number of training rows, rounded down."""
        return rounded_rows(len(self.lengths))

    def cut_otherwise(self, other: int) -> int:
        """Return how many training rows are cut otherwise than at `other` tokens.

        Rows of exactly as many tokens as this run leaves count as cut.
        """
        own = self.exposure.max_length
        if other == own:
            return 0
        return sum(length > other if other < own else length >= own for length in self.lengths)
