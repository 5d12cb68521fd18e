"""The in-process engine: all silos in one process over one backbone. Messages are really serialised and checked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from silotune.aggregation import Update
from silotune.assembly import Federation
from silotune.coordinator import update_message
from silotune.errors import InputError
from silotune.evaluation.predict import score
from silotune.messages import MessageRefused
from silotune.parts import Scope, State, flatten, names_with
from silotune.runs import Checkpoint, RunFolder
from silotune.silo import Silo, SiloState

Progress = Callable[[int, str, int, int], None]
"""(round, what is being done, silos done in this round, silos in this round) – called before every piece of work."""


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
    validation: dict[str, float | None] = field(default_factory=dict)
    sampled: list[str] = field(default_factory=list)


class InProcess:
    """Runs a federation round by round and leaves a checkpoint after each."""

    name = "inprocess"

    def __init__(self, federation: Federation, folder: RunFolder, progress: Progress | None = None) -> None:
        self._federation = federation
        self._folder = folder
        self._progress = progress or (lambda *_: None)
        self._history = History()
        self._best: Checkpoint | None = None
        self._last: Checkpoint | None = None

    def run(self) -> History:
        """All rounds that are left, then the method's final phases, which count as part of the last round."""
        self._restore()
        rounds = self._federation.config.rounds
        done = self._last.round if self._last else 0
        for number in range(done + 1, rounds + 1):
            self._round(number, final=number == rounds)
        return self._history

    def _restore(self) -> None:
        self._last = self._folder.latest()
        if self._last is not None:
            self._restore_from(self._last)
        # Last: what cannot be resumed stays as it is.
        self._folder.forget_events_after(self._last.round if self._last else 0)

    def _restore_from(self, last: Checkpoint) -> None:
        try:
            self._history = History(**last.history)
        except TypeError as error:
            raise InputError(f"checkpoint round-{last.round:04d}.json: damaged ({error})") from error
        self.load(last)
        if self._history.best_round not in (0, last.round):
            self._best = self._folder.load(self._history.best_round)
            for name in sorted(self._best.files):  # damage is found now, not after the last round
                self._folder.read(name)
        else:
            self._best = last

    def load(self, checkpoint: Checkpoint) -> None:
        """Set the federation to a checkpoint's state."""
        federation = self._federation
        with _whole(checkpoint.shared, federation.coordinator.shared) as check:
            federation.coordinator.load_flat(self._folder.read(checkpoint.shared))
            check(federation.coordinator.shared)
        for name, silo in federation.silos.items():
            file, silo.state = checkpoint.silos.get(name), None
            if file:
                with _whole(file, federation.training.state_of(silo).private) as check:
                    silo.state = SiloState.from_flat(self._folder.read(file))
                    check(silo.state.private)

    def load_best(self) -> int:
        """Set the federation to the best round's state, and return that round."""
        assert self._best is not None, "no round was run"
        self.load(self._best)
        return self._best.round

    def _round(self, number: int, final: bool) -> None:
        federation, history = self._federation, self._history
        started = time.perf_counter()
        chosen = federation.coordinator.choose(number, list(federation.silos))
        broadcast = federation.coordinator.broadcast(number)
        updates: list[Update] = []
        for position, name in enumerate(chosen):
            self._progress(number, name, position, len(chosen))
            update = self._train(federation.silos[name], number, broadcast)
            if update is not None:
                updates.append(update)
        federation.coordinator.aggregate(updates)
        self._server_step(number)
        history.sampled = sorted({*history.sampled, *chosen})
        touched = set(chosen)
        if final and any(phase.when == "end" for phase in federation.training.phases):
            touched |= self._finish(number)
        self._progress(number, "validation", len(chosen), len(chosen))
        history.validation = self._validate()
        scores = [value for value in history.validation.values() if value is not None]
        mean = math.fsum(scores) / len(scores) if scores else float(number)  # without validation rows: the last round
        better = mean > history.best_validation
        if better:
            history.best_round, history.best_validation = number, mean
        history.seconds += time.perf_counter() - started
        self._folder.event("round", round=number, silos=chosen, validation=history.validation, seconds=history.seconds)
        self._checkpoint(number, touched, better)

    def _train(self, silo: Silo, number: int, broadcast: bytes) -> Update | None:
        """One silo's round, as over a wire: it sees the broadcast's bytes, the coordinator sees the update's."""
        federation, history = self._federation, self._history
        coordinator, training = federation.coordinator, federation.training
        shared = coordinator.read_broadcast(broadcast)
        result = training.round(silo, shared, number)
        history.training_seconds += result.metrics["seconds"]
        history.training_rows += int(result.metrics["rows"])
        update: Update | None = None
        sizes = {"bytes_down": 0, "bytes_up": 0}
        if coordinator.communicates:
            message = update_message(result.state, training.parts, number, silo.name, silo.rows)
            sizes = {"bytes_down": len(broadcast), "bytes_up": len(message)}
            history.bytes_down += sizes["bytes_down"]
            history.bytes_up += sizes["bytes_up"]
            try:
                update = coordinator.receive(number, silo.name, message)
            except MessageRefused as refusal:
                self._folder.event("refused", round=number, silo=silo.name, reason=str(refusal))
        training.keep(silo, result)
        note = {"note": result.note} if result.note else {}
        self._folder.event("silo", round=number, silo=silo.name, **sizes, **result.metrics, **note)
        return update

    def _server_step(self, number: int) -> None:
        """The coordinator trains the aggregated parts on its own labelled rows, where the method says so."""
        federation, history = self._federation, self._history
        if federation.server is None:
            return
        result = federation.training.server_step(federation.server, federation.coordinator.shared, number)
        federation.coordinator.adopt(result.state)
        history.training_seconds += result.metrics["seconds"]
        history.training_rows += int(result.metrics["rows"])
        self._folder.event("server", round=number, **result.metrics)

    def _finish(self, number: int) -> set[str]:
        """The method's final phases, local to every silo they concern."""
        federation = self._federation
        everyone = any(phase.when == "end" and phase.who == "all" for phase in federation.training.phases)
        names = sorted(federation.silos) if everyone else self._history.sampled
        for position, name in enumerate(names):
            self._progress(number, f"final phase: {name}", position, len(names))
            silo = federation.silos[name]
            result = federation.training.round(silo, federation.coordinator.shared, number, when="end")
            federation.training.keep(silo, result)
            self._folder.event("final", round=number, silo=name, **result.metrics)
        return set(names)

    def _validate(self) -> dict[str, float | None]:
        federation = self._federation
        found = scores(federation, "validation")
        return found if federation.central is None else {"global": mean(found)}

    def _checkpoint(self, number: int, touched: set[str], better: bool) -> None:
        federation, folder = self._federation, self._folder
        shared = folder.write(f"shared-{number:04d}", federation.coordinator.flat())
        files = dict(self._last.silos) if self._last else {}
        for name in sorted(touched):
            state = federation.silos[name].state
            assert state is not None, "a silo that trained has a state"
            files[name] = folder.write(f"{name}/{number:04d}", state.flat())
        checkpoint = Checkpoint(number, shared, files, self._history.__dict__)
        if better:
            self._best = checkpoint
        folder.commit(checkpoint, self._best)
        self._last = checkpoint


@contextmanager
def _whole(file: str, expected: State) -> Iterator[Callable[[State], None]]:
    """Refuse a checkpoint file whose tensors are not those of this run; yields the check of what was read."""

    def check(found: State) -> None:
        shapes, wanted = ({n: (t.shape, t.dtype) for n, t in flatten(state).items()} for state in (found, expected))
        differing = sorted(name for name in {*shapes, *wanted} if shapes.get(name) != wanted.get(name))
        if differing:
            raise ValueError(f"tensor {differing[0]!r} is missing, unexpected or of another shape")

    try:
        yield check
    except (KeyError, ValueError) as error:
        raise InputError(f"checkpoint file {file}: damaged ({error})") from error


def state_of(federation: Federation, silo: Silo) -> State:
    """The silo's whole model after aggregation: the coordinator's shared parts and its own private ones."""
    return federation.coordinator.shared | federation.training.state_of(silo).private


def scores(federation: Federation, split: Literal["validation", "test"]) -> dict[str, float | None]:
    """Per reported silo, the score of its model (percent; None without rows).

    Where one data set is partitioned all silos are judged on the same central rows. Predictions with shared parts
    alone are then one model's, and made once; with private parts, every silo's model is judged on them.
    """
    training = federation.training
    prediction = training.method.prediction()
    shared = names_with(training.parts, Scope.SHARED)
    learned = any(callable(weight) for weight in prediction.mix.values())  # from a silo's own state
    head = training.parts[prediction.head].module
    heads = {prediction.head} if getattr(head, "has_tensors", True) else set()
    alike = not learned and {*prediction.mix, *heads} <= {*shared}
    made: dict[tuple[str, int], float | None] = {}
    found = {}
    for silo in federation.silos.values():
        for name, evaluation in silo.evaluations.items():
            key = ("" if alike else silo.name, id(evaluation))
            if key not in made:
                made[key] = score(training, state_of(federation, silo), getattr(evaluation, split))
            found[name] = made[key]
    return found


def mean(found: Mapping[str, float | None]) -> float | None:
    """The mean over silos, in any order; None without rows. Equal scores are their own mean, to the bit."""
    values = [value for value in found.values() if value is not None]
    if len(set(values)) <= 1:
        return values[0] if values else None
    return math.fsum(values) / len(values)


def results(federation: Federation) -> dict[str, dict[str, Any]]:
    """Per reported silo: metric, validation and test score at the federation's present state, and row counts."""
    found: dict[str, dict[str, Any]] = {}
    validation, test = scores(federation, "validation"), scores(federation, "test")
    for silo in federation.silos.values():
        for name, evaluation in silo.evaluations.items():
            task = evaluation.test.task
            found[name] = {
                "metric": task.metric,
                "validation": validation[name],
                "test": test[name],
                "rows": {
                    "train": len(silo.train[task.name]),
                    "validation": len(evaluation.validation),
                    "test": len(evaluation.test),
                },
            }
    return found
