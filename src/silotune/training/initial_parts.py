"""Make initial parts before round 1, or redrawn ones before a round, from the seed and at a silo's rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from silotune.core import tensors as part_tools
from silotune.core.randomness import generator
from silotune.core.tensors import State, Tensors
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.methods.base import Method
from silotune.methods.parts import Part, Scope
from silotune.methods.validation import check_shared, check_tuners
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners import TensorGroup, Tuner, tuner_of
from silotune.training.silo import Silo


@dataclass(frozen=True)
class TrainedParts:
    """The parts of a finished run, with which another one goes on.

    Args:
        source: the run's folder, for messages.
        read: returns a silo's private parts, or with None the shared ones; None for a silo that the run did not have.
    """

    source: str
    read: Callable[[str | None], State | None]

    def instead_of(self, drawn: State, parts: Mapping[str, Part], silo: str | None = None) -> State:
        """Return the trained tensors of parts, in the order of those that were drawn; parts drawn anew stay drawn."""
        start = self.read(silo)
        if start is None:
            return drawn
        return {
            name: tensors if parts[name].redrawn else self._fitting(name, tensors, start.get(name, {}))
            for name, tensors in drawn.items()
        }

    def _fitting(self, part: str, drawn: Tensors, start: Tensors) -> Tensors:
        for name in dict.fromkeys([*drawn, *start]):
            shapes = [tuple(tensors[name].shape) if name in tensors else "missing" for tensors in (start, drawn)]
            if shapes[0] != shapes[1]:
                raise InputError(
                    f"start: {self.source} has {name!r} of part {part!r} as {shapes[0]}, this run as {shapes[1]}; "
                    "allowed: a run of the same method, tuner, head and labels"
                )
        return {name: start[name].to(tensor.dtype) for name, tensor in drawn.items()}


class InitialParts:
    """Derives the tensors of a method's parts from the run's seed.

    `start` holds initial tensors of every adapter, or the parts of a finished run; None: all are drawn.
    """

    def __init__(
        self,
        backbone: Backbone,
        method: Method,
        parts: Mapping[str, Part],
        seed: int,
        start: Tensors | TrainedParts | None,
    ) -> None:
        self._backbone = backbone
        self._method = method
        self._parts = parts
        self._seed = seed
        self.start = start
        self.ranks: Mapping[str, int] = method.setting.tuner.ranks
        """Silo → rank of its adapters, for silos of another one than the tuner's."""

    def shared(self, silos: Iterable[Silo]) -> State:
        """Return the shared parts before round 1, equal in all silos."""
        tasks = {rows.task.name: rows.task for silo in silos for rows in silo.train.values()}
        shared = self._trained(self._all(Scope.SHARED, tasks.values()))
        check_shared(self._method, shared)
        return shared

    def private(self, silo: str, tasks: Sequence[Task]) -> State:
        """Return a silo's private parts before its first participation, at its rank."""
        private = self._all(Scope.PRIVATE, tasks, silo)
        check_tuners(self._method, private)
        return self._trained(self.at_rank(private, silo), silo)

    def fixed(self) -> State:
        """Return the fixed parts, at the tuner's rank."""
        fixed = self._all(Scope.FIXED, [])
        check_tuners(self._method, fixed)
        return fixed

    def redrawn(self, number: int) -> State:
        """Return the parts that the coordinator redraws before a round (`Part.redrawn`)."""
        draws = {
            name: generator(self._seed, "redraw", name, number) for name, part in self._parts.items() if part.redrawn
        }
        return {name: self._parts[name].module.init(self._backbone, [], draw) for name, draw in draws.items()}

    def at_rank(self, state: State, silo: str) -> State:
        """Return parts with a silo's rank; the state itself where that is the tuner's own."""
        rank = self.ranks.get(silo)
        return state if rank is None else at_rank(state, self._parts, rank)

    def _trained(self, drawn: State, silo: str | None = None) -> State:
        start = self.start
        return start.instead_of(drawn, self._parts, silo) if isinstance(start, TrainedParts) else drawn

    def _all(self, scope: Scope, tasks: Iterable[Task], silo: str = "") -> State:
        tasks = list(tasks)
        return {name: self._one(name, part, tasks, silo) for name, part in self._parts.items() if part.scope is scope}

    def _one(self, name: str, part: Part, tasks: Iterable[Task], silo: str) -> Tensors:
        start: Tensors = {}
        if isinstance(self.start, Mapping) and isinstance(part.module, Tuner | TensorGroup):
            start = part.module.select(self.start)
        if start:
            return part_tools.copy(start)
        if part.start is not None:  # draw as that part does; a shared one is the same on all silos
            name, silo = part.start, "" if self._parts[part.start].scope is Scope.SHARED else silo
        silo = "" if part.alike else silo
        return part.module.init(self._backbone, tasks, generator(self._seed, "init", name, silo))


def at_rank(state: State, parts: Mapping[str, Part], rank: int) -> State:
    """Return parts with their adapters at a rank, up to that of the tuner."""
    tuners = {name: tuner_of(parts[name].module) for name in state}
    return {
        name: tensors if (tuner := tuners[name]) is None else tuner.at_rank(tensors, rank)
        for name, tensors in state.items()
    }
