"""Hold the settings of DP-SGD in a silo: units, clipping bound, noise, and the secret of its random draws."""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from typing_extensions import override

from silotune.communication.masks.shared_noise import SharedNoise
from silotune.communication.privacy.noise import NoiseStream
from silotune.communication.privacy.row_accountant import Events
from silotune.core.tensors import State, Tensors, digest, flatten
from silotune.errors import InputError
from silotune.methods.base import Method
from silotune.methods.phase import Phase
from silotune.methods.step import PREVIOUS, LocalTraining
from silotune.training.silo import Silo, SiloState

Place = tuple[str, int]
"""A row: its task's name, and its index among the task's rows."""


@dataclass(frozen=True)
class RowPlan:
    """How much noise a silo adds in a run, and how often.

    Args:
        unit: `row`, or the column whose values are the units.
        rate: the probability with which a step draws a unit.
        steps: noised steps after 0, 1, 2, … rounds, and after the final phases if they have noise.
        multiplier: standard deviation of the noise, in multiples of the bound.
        colluders: where the silos share this noise, how many others may leave out theirs; None: it is the silo's own.
    """

    unit: str
    rate: float
    steps: tuple[int, ...]
    multiplier: float
    colluders: int | None = field(default=None, repr=False)

    @property
    def events(self) -> Events:
        """All noised steps of the run."""
        return ((self.multiplier, self.rate, self.steps[-1]),)

    def over(self, other: RowPlan) -> float:
        """Return how many times the noise of another plan for the same steps this one has."""
        return self.multiplier / other.multiplier if other.multiplier else 1.0

    def with_noise(self, events: Events) -> RowPlan:
        """Return the same plan with the noise of these steps, which have the form of `events`."""
        return replace(self, multiplier=events[0][0])


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
        leaving: the parts on which what leaves a silo may depend; see `leaving_parts`.
        every: whether all parts leave, because the silo's model may be given away (`privacy.parts=all`).
        rate: the probability with which a step draws a unit; None: `train.batch_size` / units.
        shares: the noise on shared parts that all silos add together; None: each adds its own.
    """

    clip: float
    rows_per_unit: int
    plans: Mapping[str, RowPlan]
    phases: frozenset[str]
    secret: bytes | None
    seed: int
    run: str
    leaving: frozenset[str] = frozenset()
    every: bool = False
    rate: float | None = None
    shares: SharedNoise | None = None

    def covers(self, phase: Phase) -> bool:
        """Return whether a phase's gradients get noise; final phases, after which nothing leaves, only with `every`."""
        return (self.every or phase.when == "round") and phase.name in self.phases

    def seen_by(
        self, phase: Phase, state: State, memory: Tensors, training: LocalTraining
    ) -> tuple[State, Tensors, LocalTraining]:
        """Return the silo's parts, memory and local training as far as a phase's functions may read them.

        What leaves the silo may depend on a phase that changes a leaving part. It sees leaving parts alone, and of the
        phases' steps only numbers that follow from the number of units: nothing in which rows have no noise.
        """
        if phase.when == "end" or not self.leaving & {*phase.changes}:
            return state, memory, training
        counted = training.steps.keys() & {*self.phases, phase.name}
        remembered = tuple(f"{PREVIOUS}/{name}/" for name in self.leaving)
        return (
            {name: tensors for name, tensors in state.items() if name in self.leaving},
            {key: tensor for key, tensor in memory.items() if key.startswith(remembered)},
            LocalTraining(
                training.lr,
                {name: training.steps[name] for name in counted},
                {name: training.rate_sums[name] for name in counted},
            ),
        )

    def deviation(self, silo: str) -> float:
        """Return the standard deviation of a silo's noise on the sum of its units' clipped gradients."""
        return self.plans[silo].multiplier * self.clip

    def planned(self, plans: Mapping[str, RowPlan], run: str = "") -> RowPrivacy:
        """Return the same settings with these plans; draws of a named run also depend on the name."""
        if self.shares is not None and any(each.multiplier != self.shares.multiplier for each in plans.values()):
            raise InputError("privacy.shares: all silos add shares of one noise; a silo's budget asks for more")
        return replace(self, plans=plans, run=f"{self.run}{run}")

    def digest(self, silo: Silo, number: int, received: State, state: SiloState) -> str:
        """Return the digest of a round's question and the plan; a ledger charges an answer by it: fresh draws cost."""
        plan = repr(self.plans.get(silo.name))  # one draw under two strengths of noise would reveal it
        return question(self.run, silo, number, received, state, plan)

    def stream(self, silo: Silo, number: int, received: State, state: SiloState) -> NoiseStream:
        """Return the stream of random numbers that a silo draws from in a round; arguments as of `digest`."""
        return self.stream_of(self.digest(silo, number, received, state))

    def stream_of(self, question: str) -> NoiseStream:
        """Return the stream of random numbers for the answer to a question, which its digest names."""
        key = self.secret if self.secret is not None else f"row privacy {self.seed}".encode()
        return NoiseStream(hmac.digest(key, question.encode(), "sha256"))


def each_alone(method: Method, phases: Iterable[Phase]) -> Iterator[Phase]:
    """Yield phases to run, and refuse a method whose object or classes hold something else after one than before.

    What they hold could carry rows past their noise, from one phase or row to another.
    """
    before = _held_by(method)
    for phase in phases:
        yield phase
        if _held_by(method) != before:
            raise InputError(
                f"privacy.unit: method {method.name} keeps something in its object or class while phase {phase.name!r} "
                "runs; allowed: functions of their arguments and of the method's options"
            )


class _Values(pickle.Pickler):
    """Writes what objects hold; functions, properties and classes are told apart by identity."""

    @override
    def persistent_id(self, value: object) -> int | None:
        return id(value) if isinstance(value, type) or hasattr(type(value), "__get__") else None


def _held_by(method: Method) -> bytes:
    """Return all that a method's object and its classes hold, with its tuner, head and options."""
    owners = (method, *type(method).__mro__[: type(method).__mro__.index(Method) + 1])
    values = [{name: value for name, value in vars(owner).items() if name != "_abc_impl"} for owner in owners]
    written = io.BytesIO()
    _Values(written).dump(values)
    return written.getvalue()


def question(run: str, silo: Silo, number: int, received: State, state: SiloState | None, plan: str = "") -> str:
    """Return a digest of all that a silo's answer in a round depends on: equal ones have equal draws.

    Answers to two different broadcasts must not carry the same noise, or subtracting them would cancel it. So the
    digest covers the tensors as received, the silo's own (None: it has none yet), its rows, the plan, the round, and
    `run`, which names the run and its configuration.
    """
    inputs = digest(flatten(received)), digest(state.flat() if state else {}), _rows_digest(silo)
    return hashlib.sha256("\x1f".join((run, silo.name, plan, str(number), *inputs)).encode()).hexdigest()


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
