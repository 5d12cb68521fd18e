"""The base class of engines: rounds, the best round, events, checkpoints and resume.

An engine adds how silos are reached. Everything passes between coordinator and silo as bytes.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field
from functools import partial
from typing import Any, ClassVar

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from silotune.aggregation import Update, in_name_order
from silotune.core.files import damage_named
from silotune.core.numeric import mean_ignoring_none
from silotune.evaluation.predict import Measured
from silotune.runs.storage.checkpoints import Checkpoint, check_state
from silotune.runs.storage.run_folder import RunFolder
from silotune.training.client import SiloReply
from silotune.training.coordinator import Received
from silotune.training.federation import Federation

Progress = Callable[[int, str, int, int], None]
"""Called before every piece of work with (round, description, silos done in this round, silos in this round)."""


Broadcast = Callable[[str], bytes]
"""Silo → the message with the shared parts for it."""


class Engine(ABC):
    """Runs a federation round by round and leaves a checkpoint after each."""

    name: ClassVar[str]
    scores_deferred: ClassVar[bool] = False
    """Whether a round's scores come with the next round's replies: one message a round instead of two."""

    def __init__(self, federation: Federation, folder: RunFolder, progress: Progress | None = None) -> None:
        self.federation = federation
        self.folder = folder
        self.progress = progress or (lambda *_: None)
        self.history = History()
        self.cohort = 1  # silos that train together
        self.workers = 1  # processes that train
        self.stopped_after: int | None = None  # the last round, if `train.early_stopping` ended the run
        self.tested: Mapping[str, Measured] = {}
        """Reported silo → what `results` measured on its test rows; empty where those are in other processes."""
        self._best: Checkpoint | None = None
        self._last: Checkpoint | None = None

    def working(self) -> AbstractContextManager[None]:
        """Return the context in which the engine works, from its first round to its results."""
        return nullcontext()

    @abstractmethod
    def rounds(self, round_number: int, silos: Sequence[str], broadcast: Broadcast) -> Iterator[Received]:
        """Run one local round of these silos; yields their read replies in any order, at most one per silo."""

    @abstractmethod
    def finals(self, round_number: int, silos: Sequence[str], broadcast: Broadcast) -> Iterator[SiloReply]:
        """Run these silos' final phases; yields their replies in any order, at most one per silo."""

    def judge_finished(self, round_number: int, silos: Sequence[str], broadcast: Broadcast) -> Scores:
        """Run these silos' final phases as if this round was the last, judge it, and set all silos back."""
        raise NotImplementedError(f"{self.name}: silos cannot be set back")

    @abstractmethod
    def validate(self, round_number: int) -> Scores:
        """Return the silos' scores on validation rows, with the shared parts at the end of that round."""

    @abstractmethod
    def results(self) -> dict[str, dict[str, Any]]:
        """Return per reported silo its entry in `summary.json` at the present state."""

    @abstractmethod
    def save_states(self, round_number: int, silos: Sequence[str], better: bool) -> Mapping[str, str]:
        """Save these silos' states; returns silo → checkpoint file, for states that are in the run folder."""

    @abstractmethod
    def load_states(self, checkpoint: Checkpoint) -> None:
        """Set the silos to a checkpoint's states."""

    def run(self) -> None:
        """Run the remaining rounds, then the method's final phases, which belong to the last round."""
        if not self.federation.config.rounds:
            self.history.best_scores = self.validate(0)
            return
        if self.federation.privacy is not None:
            self.federation.privacy.require_a_round()
        self._restore()
        if not self.scores_deferred:  # another engine may have left a round to be judged
            self._judge_pending()
        rounds = self.federation.rounds
        done = self._last.round if self._last else 0
        for round_number in range(done + 1, rounds + 1):
            if self._stops(round_number - 1):
                return
            if round_number == rounds and self.federation.privacy is not None and self.federation.privacy.stops:
                self.folder.event("budget", round=round_number, reason=self.federation.privacy.stops)
            self._round(round_number, final=round_number == rounds)

    def _stops(self, judged: int) -> bool:
        """Return whether `train.early_stopping` ends the run after a round."""
        patience = self.federation.config.train.early_stopping
        if patience is None or judged - self.history.best_round < patience:
            return False
        reason = f"{patience} rounds without a better validation score"
        self.stopped_after = judged
        self.folder.forget_event("stopped", judged)  # of a finished run that is resumed
        self.folder.event("stopped", round=judged, reason=reason)
        return True

    def load(self, checkpoint: Checkpoint) -> None:
        """Set the federation to a checkpoint's state."""
        coordinator = self.federation.coordinator
        expected = coordinator.shared
        with damage_named(f"checkpoint file {checkpoint.shared}"):
            coordinator.load_flat(self.folder.checkpoints.read(checkpoint.shared))
            check_state(coordinator.shared, expected)
        self.load_states(checkpoint)

    @property
    def participants(self) -> set[str]:
        """The silos that were sampled up to the best round; the others have their initial state."""
        if not self.federation.config.rounds:
            return set()
        assert self._best is not None, "no round was run"
        return set(self._best.history["sampled"]) & set(self.federation.silos)  # others have left

    def load_best(self) -> int:
        """Set the federation to the best round's state, and return that round; 0 without rounds."""
        if not self.federation.config.rounds:
            return 0
        assert self._best is not None, "no round was run"
        self.load(self._best)
        return self._best.round

    def _restore(self) -> None:
        self._last = self.folder.checkpoints.latest()
        if self._last is not None:
            self._restore_from(self._last)
            # last, so that a folder that cannot be resumed stays unchanged
            self.folder.checkpoints.drop_older(self._last, self._best)
        self.folder.forget_events_after(self._last.round if self._last else 0)
        if self.history.pending:  # it may have been judged, but no checkpoint says so: it is judged again
            self.folder.forget_event("round", self.history.pending)
        if self.folder.changed:
            self.folder.event("versions", changed=self.folder.changed)

    def _restore_from(self, last: Checkpoint) -> None:
        with damage_named(f"checkpoint round-{last.round:04d}.json"):
            # run folders of 141778b count updates that silos withheld
            self.history = History(**{name: value for name, value in last.history.items() if name != "withheld"})
        self.load(last)
        if self.history.best_round not in (0, last.round):
            self._best = self.folder.checkpoints.load(self.history.best_round)
            for file in sorted(self._best.names):  # finds damage before the remaining rounds run
                self.folder.checkpoints.read(file)
        else:
            self._best = last if self.history.best_round else None

    def _round(self, round_number: int, final: bool) -> None:
        coordinator, history = self.federation.coordinator, self.history
        started = time.perf_counter()
        silos = coordinator.choose(round_number, list(self.federation.silos))
        touched: set[str] = set()
        refused: set[str] = set()
        broadcast = partial(coordinator.broadcast, round_number)
        updates = self._updates(round_number, silos, broadcast, touched, refused)

        def refuse(silo: str, reason: str) -> None:
            refused.add(silo)
            self.folder.event("refused", round=round_number, silo=silo, reason=reason)

        coordinator.aggregate(in_name_order(updates, silos), round_number, refuse, len(silos))
        error = {} if coordinator.product_error is None else {"product_error": coordinator.product_error}
        if report := {**error, **coordinator.report}:
            self.folder.event("aggregation", round=round_number, **report)
        self._judge_pending()
        contributed = [name for name in silos if name in touched - refused]
        self._server_step(round_number)
        history.sampled = sorted({*history.sampled, *touched})
        ends = any(phase.when == "end" for phase in self.federation.context.phases)
        if final and ends:
            touched |= self._finish(round_number)
        judged = final or not ends  # with final phases, only the last round's models are complete
        stops_early = self.federation.config.train.early_stopping is not None  # it needs each round's scores at once
        if judged and not final and self.scores_deferred and not stops_early:
            history.pending, history.pending_silos = round_number, contributed
            history.seconds += time.perf_counter() - started
            self._checkpoint(round_number, touched, better=False)
            return
        self.progress(round_number, "validation", len(silos), len(silos))
        scores = self.validate(round_number) if judged else self._scores_if_finished(round_number)
        history.seconds += time.perf_counter() - started
        better = self._judge(round_number, scores, contributed, judged)
        self._checkpoint(round_number, touched, better)

    def _judge_pending(self) -> None:
        """Judge the previous round, whose checkpoint is the last one."""
        round_number, contributed = self.history.pending, self.history.pending_silos
        if not round_number:
            return
        scores = self.validate(round_number)
        if self._judge(round_number, scores, contributed):
            self._best = self._last

    def _judge(self, round_number: int, scores: Scores, contributed: Sequence[str], judged: bool = True) -> bool:
        """Add a round's scores to the history; return whether it is the best round so far."""
        history = self.history
        history.validation, history.pending, history.pending_silos = scores, 0, []
        average = mean_ignoring_none(scores.values())
        mean = float(round_number) if average is None else average  # without validation rows the last round is the best
        lower = self.federation.lower_is_better
        # scores without noise, or of single silos, then choose no round
        secrecy = self.federation.config.privacy.unit is not None or self.federation.config.aggregation.secure
        better = judged and (secrecy or is_better(scores, mean, history.best_scores, history.best_validation, lower))
        if better:
            history.best_round, history.best_validation, history.best_scores = round_number, mean, scores
        self.folder.event(
            "round", round=round_number, silos=list(contributed), validation=scores, seconds=history.seconds
        )
        return better

    def _updates(
        self, round_number: int, silos: Sequence[str], broadcast: Broadcast, answered: set[str], refused: set[str]
    ) -> Iterator[Update]:
        """Yield the round's updates as they arrive; refused ones are named in the events and left out.

        Silos that answered are added to `answered`; those with refused updates also to `refused`.
        """
        coordinator, history = self.federation.coordinator, self.history
        for received in self.rounds(round_number, silos, broadcast):
            answer = received.reply
            answered.add(answer.silo)
            history.count_training(answer.metrics)
            sizes = {"bytes_down": 0, "bytes_up": 0}
            if coordinator.communicates:
                down = len(broadcast(answer.silo)) + received.forwarded
                sizes = {"bytes_down": down, "bytes_up": len(answer.message)}
                history.bytes_down += sizes["bytes_down"]
                history.bytes_up += sizes["bytes_up"]
            if received.refusal:  # it may quote names that the silo sent
                refused.add(answer.silo)
                self.folder.event("refused", round=round_number, silo=answer.silo, reason=received.refusal[:500])
            note = {"note": answer.note} if answer.note else {}
            self.folder.event("silo", round=round_number, silo=answer.silo, **sizes, **answer.metrics, **note)
            if received.update is not None:
                yield received.update

    def _server_step(self, round_number: int) -> None:
        """Train the aggregated parts on the coordinator's labeled rows, if the method does so."""
        federation, history = self.federation, self.history
        if federation.server is None:
            return
        result = federation.trainer.server_step(federation.server, federation.coordinator.shared, round_number)
        federation.coordinator.adopt(result.state)
        history.count_training(result.metrics)
        self.folder.event("server", round=round_number, **result.metrics)

    def _finishing(self) -> list[str]:
        """Return the silos that the method's final phases concern."""
        everyone = any(phase.when == "end" and phase.who == "all" for phase in self.federation.context.phases)
        return [name for name in sorted(self.federation.silos) if everyone or name in self.history.sampled]

    def _scores_if_finished(self, round_number: int) -> Scores:
        """Return a round's validation scores as if it was the last one; none unless they are asked for."""
        if not self.federation.config.evaluation.finish_per_round:
            return {}
        broadcast = partial(self.federation.coordinator.broadcast, round_number)
        return self.judge_finished(round_number, self._finishing(), broadcast)

    def _finish(self, round_number: int) -> set[str]:
        """Run the method's final phases in the silos they concern; return the silos that replied."""
        coordinator, history = self.federation.coordinator, self.history
        broadcast = partial(coordinator.broadcast, round_number)
        answered: set[str] = set()
        for answer in self.finals(round_number, self._finishing(), broadcast):
            answered.add(answer.silo)
            size = len(broadcast(answer.silo)) if coordinator.communicates else 0
            history.bytes_down += size
            self.folder.event("final", round=round_number, silo=answer.silo, bytes_down=size, **answer.metrics)
        return answered

    def _checkpoint(self, round_number: int, touched: set[str], better: bool) -> None:
        shared = self.folder.checkpoints.write(f"shared-{round_number:04d}", self.federation.coordinator.flat())
        files = dict(self._last.silos) if self._last else {}
        files |= self.save_states(round_number, sorted(touched), better)
        checkpoint = Checkpoint(round_number, shared, files, dict(self.history.__dict__))
        if better:
            self._best = checkpoint
        self.folder.checkpoints.commit(checkpoint, self._best)
        self._last = checkpoint


Scores = dict[str, float | None]
"""Reported silo → score in percent or loss, None without rows; `global` is the only key if all share the same rows."""


@dataclass(config=ConfigDict(extra="forbid"))
class History:
    """The run's counters and scores so far; stored in every checkpoint, whose values pydantic checks."""

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
    a round judged by more silos replaces one judged by a subset of them. Without scores a mean is the round's number,
    and the later round is better.
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
