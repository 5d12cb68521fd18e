"""`RequestWork`: the passes, steps, tokens and rows of one request to a silo, counted beforehand, for its policy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from silotune.data.batching import batch_count
from silotune.distributed.silo.exposure import phase_length, rounded_rows
from silotune.methods.parts import Scope
from silotune.methods.phase import Phase
from silotune.training.context import TrainingContext
from silotune.training.silo import Silo


@dataclass(frozen=True)
class RequestWork:
    """The work of one request: passes in its longest phase, optimizer steps, tokens at most, and rows seen.

    `shared_steps` counts the steps of phases that train a part which leaves. Where a schedule gives steps different
    weights, half of them count: together they weigh about as much as half as many equal ones. The number of rows
    enters rounded down, because the steps and epochs at which a limit begins to refuse would tell it.
    """

    epochs: int
    steps: int
    tokens: int
    rows: int
    shared_steps: int

    @classmethod
    def of(cls, context: TrainingContext, silo: Silo, phases: Iterable[Phase]) -> RequestWork:
        """Return the work of a silo in phases, before anything is trained."""
        train, tasks = context.train, [rounded_rows(rows.examples) for rows in silo.train.values()]
        rows, per_epoch = sum(tasks), sum(batch_count(task, train.batch_size) for task in tasks)
        epochs, steps, shared_steps = 0, 0, 0
        for phase in phases:
            unit, count = phase_length(context, phase)
            number = count if unit == "steps" else per_epoch * count
            if not phase.trains:
                continue
            epochs = max(epochs, math.ceil(number / max(per_epoch, 1)) if unit == "steps" else count)
            steps += number * phase.steps_per_batch
            # several steps on one batch say no more about its rows than one does
            if any(context.parts[name].scope is Scope.SHARED for name in phase.changes):
                shared_steps += number if train.steady else max(1, number // 2)
        tokens = steps * min(train.batch_size, rows) * train.max_length
        smallest = min((task // batch_count(task, train.batch_size) for task in tasks if task), default=0)
        of_a_step = smallest if train.batches == "even" else train.batch_size
        return cls(epochs, steps, tokens, min(rows, shared_steps * of_a_step), shared_steps)
