"""Hold the settings of DP-SGD in a silo: units, clipping bound, noise, and the secret of its random draws."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace

from silotune.communication.privacy.noise import NoiseStream
from silotune.core.tensors import State, digest, flatten
from silotune.methods.phase import Phase
from silotune.training.silo import Silo, SiloState

Place = tuple[str, int]
"""A row: its task's name, and its index among the task's rows."""


@dataclass(frozen=True)
class RowPlan:
    """How much noise a silo adds in a run, and how often.

    Args:
        unit: `row`, or the column whose values are the units.
        rate: the probability with which a step draws a unit.
        steps: noised steps after 0, 1, 2, … rounds.
        multiplier: standard deviation of the noise, in multiples of the bound.
    """

    unit: str
    rate: float
    steps: tuple[int, ...]
    multiplier: float

    def in_round(self, number: int) -> int:
        """Return the noised steps of one round."""
        return self.steps[number] - self.steps[number - 1]


@dataclass(frozen=True)
class RowPrivacy:
    """The settings of DP-SGD in all silos of a process.

    Args:
        clip: the largest L2 norm of a unit's gradient, over all tensors that a phase trains.
        rows_per_unit: the most rows of a unit in one step.
        plans: silo → its noise.
        phases: names of the phases whose gradients are noised; see `noised_phases`.
        secret: the silo's own secret; None: draws follow from `seed`, which is a simulation.
        seed: the run's seed.
        run: a digest of the configuration, on which every draw depends.
    """

    clip: float
    rows_per_unit: int
    plans: Mapping[str, RowPlan]
    phases: frozenset[str]
    secret: bytes | None
    seed: int
    run: str

    def covers(self, phase: Phase) -> bool:
        """Return whether a phase's gradients get noise; final phases get none, because nothing leaves after them."""
        return phase.when == "round" and phase.name in self.phases

    def deviation(self, silo: str) -> float:
        """Return the standard deviation of a silo's noise on the sum of its units' clipped gradients."""
        return self.plans[silo].multiplier * self.clip

    def planned(self, plans: Mapping[str, RowPlan], run: str = "") -> RowPrivacy:
        """Return the same settings with these plans; draws of a named run also depend on the name."""
        return replace(self, plans=plans, run=f"{self.run}{run}")

    def draws(self, silo: Silo, number: int, received: State, state: SiloState) -> str:
        """Return a digest of all that a silo's answer in a round depends on: equal ones have equal draws.

        Answers to two different broadcasts must not carry the same noise, or subtracting them would cancel it. So the
        digest covers the tensors as received, the silo's own, its rows, the plan, the round, the configuration and the
        run. A ledger charges an answer by the same digest, so that fresh draws are never free.
        """
        plan = repr(self.plans.get(silo.name))  # one draw under two strengths of noise would reveal it
        inputs = digest(flatten(received)), digest(state.flat()), _rows_digest(silo)
        words = (self.run, silo.name, plan, str(number), *inputs)
        return hashlib.sha256("\x1f".join(words).encode()).hexdigest()

    def stream(self, silo: Silo, number: int, received: State, state: SiloState) -> NoiseStream:
        """Return the stream of random numbers that a silo draws from in a round; arguments as of `draws`."""
        key = self.secret if self.secret is not None else f"row privacy {self.seed}".encode()
        return NoiseStream(hmac.digest(key, self.draws(silo, number, received, state).encode(), "sha256"))


def units_of(silo: Silo) -> list[list[Place]]:
    """Return the rows of each of a silo's units; without a column of units every row is one."""
    units: dict[object, list[Place]] = {}
    for task, rows in sorted(silo.train.items()):
        names = rows.units
        for row in range(rows.examples):
            units.setdefault((task, row) if names is None else names[row], []).append((task, row))
    return [*units.values(), *([] for _ in range(silo.empty_units))]


def _rows_digest(silo: Silo) -> str:
    sha = hashlib.sha256()
    for task, rows in sorted(silo.train.items()):
        sha.update(repr((task, rows.ids, rows.types, rows.decoder, rows.targets, rows.units)).encode())
        sha.update(rows.labels.numpy().tobytes())
    return sha.hexdigest()
