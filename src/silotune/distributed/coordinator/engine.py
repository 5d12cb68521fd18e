"""The Flower engine: silos on other machines, reached by messages. It runs in the ServerApp.

The coordinator holds no rows and no private part. Of every silo it knows the name of its last state (`History.taken`)
and says with each request from which state to go on: what a silo did for a round that was then given up is not built
upon, and the same request is answered from the silo's own folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from silotune.core.numeric import ceil_fraction
from silotune.distributed.coordinator.dispatcher import SiloDispatcher
from silotune.distributed.protocol.disclosure import validate_metrics, validate_scores
from silotune.distributed.protocol.frames import Frame, state_name
from silotune.errors import InputError, SilotuneError
from silotune.evaluation.scores import mean
from silotune.runs.engines.base import Engine, Progress
from silotune.runs.engines.history import Scores
from silotune.runs.storage.run_folder import Checkpoint, RunFolder
from silotune.training.client import SiloReply
from silotune.training.coordinator import Received
from silotune.training.federation import Federation

_LONGEST = 500
"""Characters of what a silo says that are kept."""

_COUNTED = {"seconds": 0.0, "rows": 0}
"""What a silo need not say of its training."""


class FlowerEngine(Engine):
    """See the module.

    Args:
        federation: with every silo's name and task, and no rows.
        folder: the run's.
        calls: reaches the silos.
        run: what every request carries: the run's id, the configuration, and the coordinator's identity.
        local: whether the silos' folders lie in the run folder (all on one machine).
        progress: called before every piece of work.
    """

    name = "flower"
    scores_deferred = True

    def __init__(
        self,
        federation: Federation,
        folder: RunFolder,
        dispatcher: SiloDispatcher,
        run: Mapping[str, Any],
        local: bool = False,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(federation, folder, progress)
        self._dispatcher = dispatcher
        self._run = dict(run)
        self._local = local
        self._options = federation.config.federation
        self._new_states: dict[str, str] = {}
        self._deferred_scores: dict[str, dict[str, Any]] = {}
        """Scores of the round before, which came with a round's answers."""

    @property
    def label(self) -> str:
        """What `summary.json` calls the engine."""
        return "flower-local" if self._local else "flower"

    def rounds(self, number: int, silos: Sequence[str], broadcast: bytes) -> Iterator[Received]:
        """See `Engine.rounds`. Below its quorum the round is asked again, then the run stops.

        Raises:
            SilotuneError: too few updates; what is finished is in the run folder.
        """
        self._new_states, self._deferred_scores = {}, {}
        yield from self._until_quorum("round", number, silos, broadcast)

    def finals(self, number: int, silos: Sequence[str], broadcast: bytes) -> Iterator[SiloReply]:
        """See `Engine.finals`."""
        for received in self._until_quorum("final", number, silos, broadcast):
            yield received.reply

    def validate(self, number: int) -> Scores:
        """See `Engine.validate`. A silo that is absent, or keeps its scores to itself, has none.

        On central rows the score is the mean over all silos, so that it is not given where one is absent.
        """
        names = sorted(self.federation.silos)
        entries = self._deferred_scores if number == self.history.pending else self._scores(number, ["validation"])
        found = {name: entries[name].get("validation") for name in names if name in entries}
        if self.federation.central is None:
            return found
        return {"global": mean(found)} if sorted(found) == names else {}

    def results(self) -> dict[str, dict[str, Any]]:
        """See `Engine.results`. What a silo does not share, or did not answer, is None."""
        number = self.history.best_round
        found = self._scores(number, ["validation", "test"])
        nothing: dict[str, Any] = {"validation": None, "test": None, "rows": None}
        tasks = self.federation.tasks
        return {name: {"metric": tasks[name].metric} | nothing | found.get(name, {}) for name in self.federation.silos}

    def save_states(self, number: int, silos: Sequence[str], better: bool) -> Mapping[str, str]:
        """The silos have kept their states by now; here only their names."""
        moved, self._new_states = self._new_states, {}
        self.history.taken = self.history.taken | moved
        return self._files(moved)

    def load_states(self, checkpoint: Checkpoint) -> None:
        """The silos keep all states that a checkpoint names; which one counts is said with each request."""
        taken = checkpoint.history.get("taken", {})
        if self._local and dict(checkpoint.silos) != self._files(taken):
            raise InputError(
                f"checkpoint round-{checkpoint.round:04d}.json: not of a run by this engine alone; resume it with "
                "--engine inprocess"
            )
        self.history.taken, self._new_states = dict(taken), {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def _files(self, taken: Mapping[str, str]) -> dict[str, str]:
        if not self._local:
            return {}
        return {name: f"silos/{name}/{self._run['run']}/{state}.safetensors" for name, state in taken.items()}

    def _base(self, name: str) -> str:
        """The state from which a silo goes on."""
        return self._new_states.get(name) or self.history.taken.get(name, "")

    def _keep(self, name: str) -> list[str]:
        """The states that checkpoints name."""
        kept = [self._last, self._best]
        return sorted({found.history["taken"][name] for found in kept if found and name in found.history["taken"]})

    def _request(self, kind: str, number: int, name: str, broadcast: bytes, **fields: Any) -> bytes:
        said = {**self._run, "round": number, "base": self._base(name), **fields}
        return Frame(kind, said, {"broadcast": broadcast}).encode()

    def _until_quorum(self, kind: str, number: int, silos: Sequence[str], broadcast: bytes) -> Iterator[Received]:
        """Updates of as many silos as the quorum asks for; refused ones are passed on, and do not count."""
        needed = max(1, ceil_fraction(self._options.quorum, len(silos))) if silos else 0
        judge = kind == "round" and bool(self.history.pending)
        resting = [name for name in sorted(self.federation.silos) if name not in silos] if judge else []
        waiting, arrived, coordinator = list(silos), 0, self.federation.coordinator
        for attempt in range(self._options.retries + 1):
            requests = {
                name: self._request(kind, number, name, broadcast, keep=self._keep(name), judge=judge)
                for name in waiting
            }
            for name in resting:  # they take no part, but say how good the round before was for them
                requests[name] = self._request("score", number, name, broadcast, splits=["validation"])
            self.progress(number, ", ".join(waiting), arrived, len(silos))
            for frame in self._dispatcher.request(requests, self._options.deadline, self._options.away):
                if frame.fields["silo"] in resting:
                    resting.remove(str(frame.fields["silo"]))
                    self._take_scores(number, frame, self._deferred_scores)
                    continue
                reply = self._read(kind, number, frame)
                if reply is None:
                    continue
                if judge:
                    self._deferred_scores[reply.silo] = frame.fields.get("scores", {})
                waiting.remove(reply.silo)
                self._new_states[reply.silo] = str(frame.fields["state"])
                received = Received(reply) if kind == "final" else coordinator.read_reply(number, reply)
                arrived += not received.refusal
                self.progress(number, ", ".join(waiting) or "all silos answered", len(silos) - len(waiting), len(silos))
                yield received
            if arrived >= needed:
                return
            again = attempt < self._options.retries
            self.folder.event("quorum", round=number, arrived=arrived, needed=needed, missing=waiting, again=again)
            if not waiting:
                break
        raise SilotuneError(
            f"round {number}: {arrived} of {len(silos)} silos sent a valid update, federation.quorum="
            f"{self._options.quorum:g} asks for {needed}; missing: {', '.join(waiting) or 'none'}; what is finished is "
            "kept (run again with --resume)"
        )

    def _read(self, kind: str, number: int, frame: Frame) -> SiloReply | None:
        """A silo's answer; None where it gives a reason instead."""
        silo = str(frame.fields["silo"])
        reason = ""
        metrics = frame.fields.get("metrics")
        state, message = frame.fields.get("state"), frame.blobs.get("message")
        if frame.kind != "answer":
            reason = str(frame.fields.get("reason", f"answered with {frame.kind!r}"))
        elif type(frame.fields.get("round")) is not int or frame.fields["round"] != number:
            reason = f"answered for round {frame.fields.get('round')!r}, asked was round {number}"
        elif state != state_name(number, kind == "final"):
            reason = f"answered with state {state!r}, its name must be {state_name(number, kind == 'final')!r}"
        elif not validate_metrics(metrics) or message is None:
            reason = "answered without metrics or message"
        elif not validate_scores(frame.fields.get("scores", {})):
            reason = "answered with something else than scores"
        if reason or message is None:
            self._failed(number, silo, reason)
            return None
        return SiloReply(silo, message, _COUNTED | dict(metrics or {}), str(frame.fields.get("note", ""))[:200])

    def _scores(self, number: int, splits: Sequence[str]) -> dict[str, dict[str, Any]]:
        broadcast = self.federation.coordinator.broadcast(number)
        names = sorted(self.federation.silos)
        requests = {name: self._request("score", number, name, broadcast, splits=list(splits)) for name in names}
        found: dict[str, dict[str, Any]] = {}
        for frame in self._dispatcher.request(requests, self._options.deadline, self._options.away):
            self._take_scores(number, frame, found)
        return {name: found[name] for name in names if name in found}

    def _take_scores(self, number: int, frame: Frame, found: dict[str, dict[str, Any]]) -> None:
        """The scores that were asked for; a silo that sends anything else has none."""
        silo, scores = str(frame.fields["silo"]), frame.fields.get("scores")
        if frame.kind != "scores":
            self._failed(number, silo, str(frame.fields.get("reason", f"answered with {frame.kind!r}")))
        elif not validate_scores(scores):
            self._failed(number, silo, "answered with something else than scores")
        else:
            found[silo] = dict(scores or {})

    def _failed(self, number: int, silo: str, reason: str) -> None:
        self.folder.event("silo-failed", round=number, silo=silo, reason=reason[:_LONGEST])
