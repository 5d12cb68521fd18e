"""Runs the rounds of a federation by asking silos on other machines for updates and scores, up to a quorum.

The coordinator holds no rows and no private part. It knows the name of each silo's last state (`History.taken`) and
sends with each request the state to start from. Work for a round that was given up is therefore not built upon, and a
repeated request is answered from the silo's own folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from typing_extensions import override

from silotune.core.numeric import ceil_fraction
from silotune.data.tasks import LOSS
from silotune.distributed.coordinator.dispatcher import SiloDispatcher
from silotune.distributed.coordinator.job import AdmissionPolicy
from silotune.distributed.coordinator.survey import combined
from silotune.distributed.protocol.disclosure import (
    Surveyed,
    read_survey,
    score_range,
    validate_metrics,
    validate_scores,
)
from silotune.distributed.protocol.frames import Frame, printable, state_name
from silotune.errors import InputError, SilotuneError
from silotune.evaluation.federation_scores import mean_score
from silotune.runs.engines.base import Broadcast, Engine, Progress, Scores
from silotune.runs.storage.checkpoints import Checkpoint
from silotune.runs.storage.run_folder import RunFolder
from silotune.training.client import SiloReply
from silotune.training.coordinator import Received
from silotune.training.federation import Federation

_LONGEST = 500
"""Characters of a silo's texts that are kept."""

_UNDISCLOSED = {"seconds": None, "rows": None}
"""Training metrics that a silo may keep to itself."""


class FlowerEngine(Engine):
    """Runs the rounds of a federation over a dispatcher.

    Args:
        federation: with every silo's name and task, and no rows.
        run: fields of every request: the run's id and the configuration.
        admission: knows the coordinator's identity, as it says it to each silo, and what silos said in their hello.
        local: whether the silos' folders are in the run folder (all on one machine).
    """

    name = "flower"
    scores_deferred = True

    def __init__(
        self,
        federation: Federation,
        folder: RunFolder,
        dispatcher: SiloDispatcher,
        run: Mapping[str, Any],
        admission: AdmissionPolicy,
        local: bool = False,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(federation, folder, progress)
        self._dispatcher = dispatcher
        self._run = dict(run)
        self._admission = admission
        self._local = local
        self._options = federation.config.federation
        self._new_states: dict[str, str] = {}
        self._deferred_scores: dict[str, dict[str, Any]] = {}
        """Scores of the previous round, which arrived with this round's replies."""
        self._reasons: dict[str, str] = {}
        """Silo → why it sent no valid update, last."""

    @property
    def label(self) -> str:
        """The engine's name in `summary.json`."""
        return "flower-local" if self._local else "flower"

    @property
    def run_id(self) -> str:
        """The id by which silos know the run."""
        return str(self._run["run"])

    @override
    def rounds(self, round_number: int, silos: Sequence[str], broadcast: Broadcast) -> Iterator[Received]:
        """Request rounds from the silos; repeat a round below its quorum, and finally stop the run."""
        self._new_states, self._deferred_scores = {}, {}
        yield from self._until_quorum("round", round_number, silos, broadcast)

    @override
    def finals(self, round_number: int, silos: Sequence[str], broadcast: Broadcast) -> Iterator[SiloReply]:
        for received in self._until_quorum("final", round_number, silos, broadcast):
            yield received.reply

    @cached_property
    def _score_ranges(self) -> dict[str, tuple[float, float]]:
        """Split → the smallest and the largest score that a silo can have there."""
        metrics = {task.metric for task in self.federation.tasks.values()}
        by_loss = self.federation.config.validates_by_loss
        return {"validation": score_range({LOSS} if by_loss else metrics), "test": score_range(metrics)}

    @override
    def validate(self, round_number: int) -> Scores:
        """Collect validation scores; a silo that is absent or does not share them has none.

        On central rows the score is the mean over all silos; there is none if a silo is absent.
        """
        names = sorted(self.federation.silos)
        entries = (
            self._deferred_scores
            if round_number == self.history.pending
            else self._scores(round_number, ["validation"])
        )
        scores = {name: entries[name].get("validation") for name in names if name in entries}
        if self.federation.central is None:
            return scores
        return {"global": mean_score(scores)} if sorted(scores) == names else {}

    @override
    def results(self) -> dict[str, dict[str, Any]]:
        """Collect the silos' results; values that a silo does not share or did not send are None."""
        scores = self.federation.config.work != "survey"
        entries = self._scores(self.history.best_round, ["validation", "test"]) if scores else {}
        empty: dict[str, Any] = {"validation": None, "test": None, "rows": None}
        tasks = self.federation.tasks
        return {name: {"metric": tasks[name].metric} | empty | entries.get(name, {}) for name in self.federation.silos}

    def survey(self) -> dict[str, Any]:
        """Ask all silos for counts of their rows, and return the entry `survey` of `summary.json`."""
        requests = {name: self._request("survey", 0, name) for name in sorted(self.federation.silos)}
        answers: dict[str, Surveyed] = {}
        for frame in self._dispatcher.request(requests, self._options.deadline, self._options.away):
            silo = str(frame.fields["silo"])
            counts = read_survey(frame.fields.get("survey")) if frame.kind == "survey" else None
            if counts is None:
                self._failed(0, silo, str(frame.fields.get("reason", "answered with something else than counts")))
            else:
                answers[silo] = counts
        if not answers:
            raise SilotuneError(f"survey: no silo answered in time; {self.folder.path} has their reasons")
        return {"survey": combined(answers, self.federation)}

    def save_states(self, round_number: int, silos: Sequence[str], better: bool) -> Mapping[str, str]:
        """Record the names of the silos' new states; the silos have stored them."""
        states, self._new_states = self._new_states, {}
        self.history.taken = self.history.taken | states
        return self._files(states)

    def load_states(self, checkpoint: Checkpoint) -> None:
        """Set the names of the silos' states; silos keep every state that a checkpoint names."""
        states = checkpoint.history.get("taken", {})
        if self._local and dict(checkpoint.silos) != self._files(states):
            raise InputError(
                f"checkpoint round-{checkpoint.round:04d}.json: not of a run by this engine alone; resume it with "
                "--engine inprocess"
            )
        self.history.taken, self._new_states = dict(states), {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def _files(self, states: Mapping[str, str]) -> dict[str, str]:
        """Return the states' files in the run folder; none unless all silos are on this machine."""
        if not self._local:
            return {}
        return {name: f"silos/{name}/{self._run['run']}/{state}.safetensors" for name, state in states.items()}

    def _base(self, name: str) -> str:
        """Return the name of the state that a silo's next round starts from; empty before its first."""
        return self._new_states.get(name) or self.history.taken.get(name, "")

    def _keep(self, name: str) -> list[str]:
        """Return the states of a silo that checkpoints refer to."""
        states = [point.history["taken"].get(name) for point in (self._last, self._best) if point is not None]
        return sorted({state for state in states if state is not None})

    def _request(self, kind: str, round_number: int, name: str, broadcast: bytes = b"", **fields: Any) -> Frame:
        identity = self._admission.identity_for(name).fields()
        header = {**self._run, "identity": identity, "round": round_number, "base": self._base(name), **fields}
        return Frame(kind, header, {"broadcast": broadcast})

    def _until_quorum(
        self, kind: str, round_number: int, silos: Sequence[str], broadcast: Broadcast
    ) -> Iterator[Received]:
        """Request a round until the quorum is reached; yields every reply, refused updates do not count."""
        needed = max(1, ceil_fraction(self._options.quorum, len(silos))) if silos else 0
        judge = kind == "round" and bool(self.history.pending)
        resting = [name for name in sorted(self.federation.silos) if name not in silos] if judge else []
        waiting, arrived, coordinator = list(silos), 0, self.federation.coordinator
        self._reasons.clear()
        for attempt in range(self._options.retries + 1):
            requests = {
                name: self._request(kind, round_number, name, broadcast(name), keep=self._keep(name), judge=judge)
                for name in waiting
            }
            for name in resting:  # not sampled: they only score the previous round
                requests[name] = self._request("score", round_number, name, broadcast(name), splits=["validation"])
            self.progress(round_number, ", ".join(waiting), arrived, len(silos))
            for frame in self._dispatcher.request(requests, self._options.deadline, self._options.away):
                if frame.fields["silo"] in resting:
                    resting.remove(str(frame.fields["silo"]))
                    self._take_scores(round_number, frame, self._deferred_scores)
                    continue
                reply = self._read(kind, round_number, frame)
                if reply is None:
                    continue
                if judge:
                    self._deferred_scores[reply.silo] = frame.fields.get("scores", {})
                waiting.remove(reply.silo)
                self._new_states[reply.silo] = str(frame.fields["state"])
                unread = kind == "final" or coordinator.secure
                received = Received(reply) if unread else coordinator.read_reply(round_number, reply)
                arrived += not received.refusal
                self.progress(
                    round_number, ", ".join(waiting) or "all silos answered", len(silos) - len(waiting), len(silos)
                )
                yield received
            self._reasons = {name: self._reasons.get(name, "no answer") for name in waiting}
            if arrived >= needed:
                return
            again = attempt < self._options.retries
            self.folder.event(
                "quorum", round=round_number, arrived=arrived, needed=needed, missing=waiting, again=again
            )
            if not waiting:
                break
        missing = ", ".join(f"{name} ({self._reasons[name]})" for name in waiting) or "none"
        raise SilotuneError(
            f"round {round_number}: {arrived} of {len(silos)} silos sent a valid update, federation.quorum="
            f"{self._options.quorum:g} asks for {needed}; missing: {missing}; what is finished is "
            "kept (run again with --resume)"
        )

    def _read(self, kind: str, round_number: int, frame: Frame) -> SiloReply | None:
        """Return a silo's reply; None, with an event, if it is a failure or malformed."""
        silo = str(frame.fields["silo"])
        reason = ""
        metrics = frame.fields.get("metrics")
        state, message = frame.fields.get("state"), frame.blobs.get("message")
        if frame.kind != "answer":
            reason = str(frame.fields.get("reason", f"answered with {frame.kind!r}"))
        elif type(frame.fields.get("round")) is not int or frame.fields["round"] != round_number:
            reason = f"answered for round {frame.fields.get('round')!r:.60}, asked was round {round_number}"
        elif state != state_name(round_number, kind == "final"):
            reason = (
                f"answered with state {state!r:.60}, its name must be {state_name(round_number, kind == 'final')!r}"
            )
        elif not validate_metrics(metrics) or message is None:
            reason = "answered without metrics or message"
        elif not validate_scores(frame.fields.get("scores", {}), self._score_ranges):
            reason = "answered with something else than scores"
        if reason or message is None:
            self._failed(round_number, silo, reason)
            return None
        return SiloReply(silo, message, _UNDISCLOSED | dict(metrics or {}), str(frame.fields.get("note", ""))[:200])

    def _scores(self, round_number: int, splits: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Ask all silos for the scores of a round's shared parts; return the answers in name order."""
        broadcast = partial(self.federation.coordinator.broadcast, round_number)
        names = sorted(self.federation.silos)
        requests = {
            name: self._request("score", round_number, name, broadcast(name), splits=list(splits)) for name in names
        }
        entries: dict[str, dict[str, Any]] = {}
        for frame in self._dispatcher.request(requests, self._options.deadline, self._options.away):
            self._take_scores(round_number, frame, entries)
        return {name: entries[name] for name in names if name in entries}

    def _take_scores(self, round_number: int, frame: Frame, entries: dict[str, dict[str, Any]]) -> None:
        """Put the scores of a reply into `entries`; anything else becomes an event."""
        silo, scores = str(frame.fields["silo"]), frame.fields.get("scores")
        if frame.kind != "scores":
            self._failed(round_number, silo, str(frame.fields.get("reason", f"answered with {frame.kind!r}")))
        elif not validate_scores(scores, self._score_ranges):
            self._failed(round_number, silo, "answered with something else than scores")
        else:
            entries[silo] = dict(scores or {})
            if note := str(frame.fields.get("note", ""))[:200]:
                self.folder.event("note", round=round_number, silo=silo, note=note)

    def _failed(self, round_number: int, silo: str, reason: str) -> None:
        self._reasons[silo] = printable(reason, _LONGEST)
        self.folder.event("silo-failed", round=round_number, silo=silo, reason=reason[:_LONGEST])
