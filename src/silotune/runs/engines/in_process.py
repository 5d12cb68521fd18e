"""Run silos or cohorts one after another in this process, with the same message bytes as over machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from silotune.communication.masks.fixed_point import read_summand, threshold_of
from silotune.errors import Diverged
from silotune.evaluation.federation_scores import Split, mean_score, measure_silos, summary_entries, with_attack
from silotune.evaluation.personalization import TestTime, score_test_time
from silotune.evaluation.predict import Measured
from silotune.runs.engines.base import Broadcast, Engine, Progress, Scores
from silotune.runs.storage.checkpoints import Checkpoint, load_silo
from silotune.runs.storage.run_folder import RunFolder
from silotune.training.at_once import ALONE
from silotune.training.broadcasts import VariantKey
from silotune.training.client import SiloReply
from silotune.training.coordinator import Received
from silotune.training.federation import Federation

if TYPE_CHECKING:  # it needs silotune[federation]
    from silotune.communication.masks.coordinator import SumsInProcess

Training = Literal["round", "final"]
"""A local round, or the final phases."""

Replies = Sequence[SiloReply]
"""The replies of silos that trained together."""


class InProcessEngine(Engine):
    """Trains silo after silo, or cohort after cohort; silos and coordinator exchange bytes only."""

    name = "inprocess"

    def __init__(self, federation: Federation, folder: RunFolder, progress: Progress | None = None) -> None:
        super().__init__(federation, folder, progress)
        self._client = federation.client()
        self.cohort = federation.cohort.size
        self._written: dict[str, str] = {}
        """Silo → its state's location, for silos that replied in this round."""
        self._by_silo: dict[int, Scores] = {}
        """Round → each reported silo's validation score, of the best round so far and the last."""

    @override
    def _restore(self) -> None:
        """Then write an event with the cohort's size, if it was chosen."""
        super()._restore()
        cohort, configured = self.federation.cohort, self.federation.config.cohort
        if configured == "auto" or (configured is None and cohort != ALONE):
            self.folder.forget_event("cohort", 0)  # of the run that is resumed, perhaps on another device
            reason = {"reason": cohort.reason} if cohort.reason else {}
            self.folder.event("cohort", round=0, size=cohort.size, **reason)

    def rounds(self, round_number: int, silos: Sequence[str], broadcast: Broadcast) -> Iterator[Received]:
        """Run one local round of these silos, cohort by cohort; see `Engine.rounds`."""
        if self.federation.coordinator.secure:
            yield from self._under_masks(round_number, silos, broadcast)
            return
        for replies in self._train("round", round_number, silos, broadcast):
            self._write(round_number, replies)
            for reply in replies:
                yield self.federation.coordinator.read_reply(round_number, reply)

    @cached_property
    def _sums(self) -> SumsInProcess:
        from silotune.communication.masks.coordinator import SumsInProcess  # needs silotune[federation]

        federation = self.federation
        return SumsInProcess(federation.silos, federation.rounds, federation.config.aggregation.least)

    def _under_masks(self, round_number: int, silos: Sequence[str], broadcast: Broadcast) -> Iterator[Received]:
        """Run one local round, and the protocol of sums under masks among its silos; the last one brings the sum."""
        replies: dict[str, SiloReply] = {}
        for trained in self._train("round", round_number, silos, broadcast):
            self._write(round_number, trained)
            replies |= {reply.silo: reply for reply in trained}
        diverged = [name for name in sorted(replies) if not replies[name].message]
        for name in diverged:
            yield Received(replies.pop(name), refusal="its change is not finite")
        own = self.federation.config.aggregation.least
        if (least := own or threshold_of(len(self.federation.silos))) > len(replies):
            raise Diverged(f"silos {', '.join(diverged)}: training diverged, and a sum under masks is of {least} silos")
        summands = {name: read_summand(reply.message) for name, reply in replies.items()}
        total = self._sums.sum(round_number, summands)
        yield from self.federation.coordinator.receive_sum(round_number, total, replies)

    def finals(self, round_number: int, silos: Sequence[str], broadcast: Broadcast) -> Iterator[SiloReply]:
        """Run the final phases of these silos, cohort by cohort; see `Engine.finals`."""
        for replies in self._train("final", round_number, silos, broadcast):
            self._write(round_number, replies)
            yield from replies

    @override
    def judge_finished(self, round_number: int, silos: Sequence[str], broadcast: Broadcast) -> Scores:
        """Score the silos after their final phases, and then restore their present states."""
        states = {name: silo.state for name, silo in self.federation.silos.items()}
        try:
            for _ in self._train("final", round_number, silos, broadcast):
                pass
            return self.validate(round_number)
        finally:
            for name, state in states.items():
                self.federation.silos[name].state = state

    def _train(
        self, kind: Training, round_number: int, silos: Sequence[str], broadcast: Broadcast
    ) -> Iterator[Replies]:
        """Train these silos, cohort by cohort; yields each cohort's replies once its silos have their new states."""
        train = self._client.rounds if kind == "round" else self._client.finals
        for position, names in self._cohorts(silos):
            self.progress(round_number, named(names, kind), position, len(silos))
            yield train([self.federation.silos[name] for name in names], broadcast(names[0]))

    def _cohorts(self, names: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
        """Yield each cohort (silos that get the same broadcast) with the number of silos in the cohorts before it.

        Silos are sorted by number of rows, most first, so that a cohort's members train about equally many batches.
        """
        if self.cohort > 1:
            names = sorted(names, key=lambda name: (-self.federation.silos[name].rows, name))
        broadcasts = self.federation.coordinator.broadcasts
        together: dict[VariantKey, list[str]] = {}
        for name in names:
            together.setdefault(broadcasts.key(name) if self.cohort > 1 else None, []).append(name)
        before = 0
        for members in together.values():
            for start in range(0, len(members), self.cohort):
                yield before + start, members[start : start + self.cohort]
            before += len(members)

    @override
    def validate(self, round_number: int) -> Scores:
        if self.federation.config.evaluation.per_round:
            judged = self._test_time(round_number)
            measures = {"personalization": judged.personalization, "test_time": judged.test_time}
            self.folder.event("evaluation", round=round_number, **measures)
        scores = self._scores(round_number)
        best = self._by_silo.get(self.history.best_round, {})
        self._by_silo = {self.history.best_round: best, round_number: scores}
        return scores if self.federation.central is None else {"global": mean_score(scores)}

    def _scores(self, round_number: int) -> Scores:
        return {name: each.score for name, each in self._measure("validation", round_number).items()}

    def _measure(self, split: Split, round_number: int) -> dict[str, Measured]:
        """Score every reported silo's present model, which is of this round."""
        return measure_silos(self.federation, split)

    def _test_time(self, round_number: int) -> TestTime:
        """Score every silo's present model, which is of this round, on every task."""
        return score_test_time(self.federation)

    @override
    def results(self) -> dict[str, dict[str, Any]]:
        """Return the results; the best round's validation scores are known, unless it was judged before a resume."""
        best = self.history.best_round
        judged = self._test_time(best) if self.federation.config.evaluation.test_time else None
        self.tested = judged.on_own_task if judged else self._measure("test", best)
        known = self._by_silo.get(best) or self.history.best_scores  # which may be a mean
        validation = known if known.keys() == self.tested.keys() else self._scores(best)
        entries = with_attack(self.federation, summary_entries(self.federation, self.tested, validation))
        return {name: entry | judged.entry(name) for name, entry in entries.items()} if judged else entries

    @override
    def save_states(self, round_number: int, silos: Sequence[str], better: bool) -> Mapping[str, str]:
        """Save the silos' states; `_write` began each file when its silo replied."""
        return {name: self._written.pop(name) for name in silos}

    def _write(self, round_number: int, replies: Replies) -> None:
        """Write the states of the silos that replied while others train."""
        self._written |= {reply.silo: self._put_away(f"{round_number:04d}", reply.silo) for reply in replies}

    def _put_away(self, file: str, name: str) -> str:
        """Write a silo's state into a file of its folder; returns the file."""
        state = self.federation.silos[name].state
        assert state is not None, "a silo that trained has a state"
        return self.folder.checkpoints.write(f"silos/{name}/{file}", state.flat())

    @override
    def load_states(self, checkpoint: Checkpoint) -> None:
        for silo in self.federation.silos.values():
            load_silo(self.folder.checkpoints, checkpoint, self.federation.context, silo)


def named(names: Sequence[str], kind: Training) -> str:
    """Return the description of a training job for progress reports."""
    who = names[0] if len(names) == 1 else f"{len(names)} silos, {names[0]} to {names[-1]}"
    return f"final phase: {who}" if kind == "final" else who
