"""The work behind a request: a local round, the final phases, scores.

Each method checks, counts the request against the operator's caps, works, and returns a `SiloAnswer`; the session
records and sends it. A repeated request gets the answer that was kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from silotune.communication.masks.fixed_point import SUMMAND
from silotune.communication.messages import message_numbers, read_broadcast
from silotune.core.clock import log_line
from silotune.core.tensors import State, digest, flatten
from silotune.distributed.protocol.disclosure import filter_scores
from silotune.distributed.protocol.frames import Frame, ProtocolError, require_fields, state_name
from silotune.distributed.silo.mask_work import base_of, require_next
from silotune.distributed.silo.policy import Policy, Request
from silotune.distributed.silo.row_ledger import Charge
from silotune.distributed.silo.setup import Prepared
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.store import Price, SiloAnswer, SiloStore
from silotune.errors import Diverged, InputError
from silotune.evaluation.federation_scores import current_model_state, measure_silos, score_silos, summary_entries
from silotune.evaluation.predict import Measured
from silotune.runs.model_folder import write_models
from silotune.runs.release import measure
from silotune.runs.storage.scored_rows import write_test_scores
from silotune.training.client import PrivacySpent, SiloReply
from silotune.training.federation import Federation
from silotune.training.row_privacy import RowPlan, question
from silotune.training.silo import Silo, SiloState

Result = TypeVar("Result")

UNSAID = "see the worker's log"
"""The reason of a failure that may follow from rows."""

_ROW_BYTES = 64
"""Of a test row in a file of predictions, beside probabilities and answers."""


class LocalWork:
    """Trains and scores one silo, counted against its operator's caps."""

    def __init__(self, settings: SiloSettings, policy: Policy, store: SiloStore) -> None:
        self.settings = settings
        self._policy = policy
        self._store = store
        self.unpaid: SiloAnswer | None = None
        """What leaves, and is charged and kept, if the present request fails after its noise was drawn.

        That it failed may follow from rows and noise, so it costs what the answer would have cost.
        """

    def train(self, prepared: Prepared, request: Frame, changed: str) -> SiloAnswer:
        """Run a local round or the final phases; `changed` tells the coordinator that rows changed within the run."""
        run, number, base, keep = require_fields(request.fields, "run", "round", "base", "keep")
        (broadcast,) = require_fields(request.blobs, "broadcast")
        final = request.kind == "final"
        judge = bool(request.fields.get("judge")) and not final
        name = state_name(int(number), final)
        key = _request_key(prepared, request, judge=str(judge), base=str(base))
        answer = self._store.find(run, name, key)
        # of a round under masks whose run had ended, the summand was erased
        if answer is not None and ("base" not in answer.about or SUMMAND in answer.frame.blobs):
            return answer
        silo = self._silo(prepared, request.kind, run, str(base))
        client = prepared.client
        shared = _of_round(client.open_broadcast(broadcast, silo.name), int(number))
        start: dict[str, str] = {}
        if prepared.config.aggregation.secure and not final:
            start = {"tensors": digest(flatten(shared)), "base": base_of(self._store, run, str(base))}
            require_next(self._store, run, int(number), recipe=prepared.recipe, **start)
            start |= {"noise": prepared.shares} if prepared.shares else {}
        leaving = 0 if final else sum(tensor.numel() for tensor in flatten(shared).values())
        state = prepared.federation.context.state_of(silo).flat()
        self._store.require_room(4 * leaving + sum(tensor.nbytes for tensor in state.values()))
        counted = self._digest(key, run, str(base))
        fields: dict[str, Any] = {"silo": silo.name, "round": int(number)}
        if judge and not prepared.keeps_numbers:  # of the previous round, whose shared parts the broadcast holds
            self._count(prepared, Request(run, "score", int(number), counted))
            fields["scores"] = self._evaluate(prepared.federation, silo, shared, int(number), ["validation"], run)
        self._count(prepared, Request(run, request.kind, int(number), counted, leaving))
        price = None if client.privacy is None else Price.of(client.privacy)
        place = prepared.config.rounds + 1 if final else int(number)  # in the plan of noise
        free = final and not (prepared.noise is not None and prepared.noise.every)
        charge = None if free else self._charge(prepared, str(run), place, silo, shared)
        if charge is not None or (price is not None and not final):
            failure = Frame("failed", {"silo": silo.name, "reason": UNSAID})
            self.unpaid = SiloAnswer(failure, {}, name, int(number), key, price=price, charge=charge)
        if final:
            nothing = SiloReply(silo.name, b"", {})
            reply = self._kept_here(prepared, lambda: client.finals([silo], broadcast)[0], nothing)
        else:
            spent = PrivacySpent() if price is None else self._store.spent(run, price)
            client.run = str(run)
            (reply,) = client.rounds([silo], broadcast, spent)
        self._check_update(prepared, reply)
        if charge is not None:
            charge = replace(charge, message=hashlib.sha256(reply.message).hexdigest())
            self._store.ledger.require(charge)
        beginning = [] if base else prepared.beginning
        note, metrics = "; ".join(filter(None, (changed, *beginning, reply.note))), reply.metrics
        if prepared.keeps_numbers:  # they follow from rows, and have no noise
            if note:
                log_line(f"silotune worker {silo.name!r}: {note}")
            note, metrics = "", {}
        fields |= {"state": name, "metrics": metrics, "note": note}
        about: dict[str, Any] = (
            {"norm": reply.norm, "epsilon": None if price is None else price.epsilon} if reply.message else {}
        )
        blobs = {"message": reply.message}
        if start:
            blobs, about = {"message": b"", SUMMAND: reply.message}, about | start
        return SiloAnswer(
            Frame("answer", fields, blobs),
            about,
            name,
            int(number),
            key,
            prepared.federation.context.state_of(silo).flat(),
            price if reply.message else None,
            charge if reply.message or final else None,
            {*map(str, keep), str(base)},
        )

    def score(self, prepared: Prepared, request: Frame) -> SiloAnswer:
        """Score the aggregated shared parts with this silo's private ones."""
        run, number, base, splits = require_fields(request.fields, "run", "round", "base", "splits")
        (broadcast,) = require_fields(request.blobs, "broadcast")
        name, splits = f"{int(number):04d}-scores", [str(split) for split in splits]
        if splits not in (["validation"], ["validation", "test"]):
            raise ProtocolError(f"no such splits to score: {splits!r:.60}")
        sharing = {"splits": ",".join(splits), "share": ",".join(self.settings.share)}
        key = _request_key(prepared, request, base=str(base), **sharing)
        if (answer := self._store.find(run, name, key)) is not None:
            return answer
        silo = self._silo(prepared, request.kind, run, str(base))
        shared = _of_round(read_broadcast(broadcast, prepared.federation.coordinator.expected), int(number))
        self._count(prepared, Request(run, "score", int(number), self._digest(key, run, str(base))))
        self._noise(prepared, str(run))
        federation = prepared.federation
        scores: dict[str, Any] = self._kept_here(
            prepared, lambda: self._evaluate(federation, silo, shared, int(number), splits, run), {}
        )
        scores = {} if prepared.keeps_numbers else scores
        note = "; ".join(prepared.beginning) if scores and prepared.config.work == "scoring" else ""
        fields = {"silo": silo.name, "scores": scores} | ({"note": note} if note else {})
        return SiloAnswer(Frame("scores", fields), {}, name, int(number), key)

    def survey(self, prepared: Prepared, request: Frame) -> SiloAnswer:
        """Count this silo's rows; counts with noise are charged."""
        (run,), counts, name = require_fields(request.fields, "run"), prepared.counts, "survey"
        if counts is None:
            raise ProtocolError("a survey in a run that is none")
        key = _request_key(prepared, request, rows=prepared.rows, figures=",".join(counts.figures))
        if (answer := self._store.find(run, name, key)) is not None:
            return answer
        silo = prepared.federation.silos[self.settings.name]
        numbers = counts.units.shape[1]
        self._count(prepared, Request(run, name, 0, self._digest(key, run, ""), numbers))
        plan, charge = self._noise(prepared, str(run)), None
        if plan is None:
            figures = counts.told()
        else:
            noise = prepared.federation.context.row_privacy
            assert noise is not None, "the plan is its own"
            drawn = question(f"{noise.run}{sorted(key.items())}", silo, 1, {}, None, repr(plan))
            charge = Charge(drawn, str(run), prepared.recipe, plan, 1)
            self._store.ledger.require(charge)
            figures = counts.told(plan.multiplier, noise.stream_of(drawn))
            charge = replace(charge, message=hashlib.sha256(json.dumps(figures).encode()).hexdigest())
        return SiloAnswer(
            Frame("survey", {"silo": silo.name, "survey": figures}), {"numbers": numbers}, name, 0, key, charge=charge
        )

    def _kept_here(self, prepared: Prepared, work: Callable[[], Result], otherwise: Result) -> Result:
        """Do work of which nothing leaves; where rows have noise, not even that it failed."""
        try:
            return work()
        except Exception:
            if prepared.noise is None:
                raise
            traceback.print_exc()
            return otherwise

    def _noise(self, prepared: Prepared, run: str) -> RowPlan | None:
        """Set the noise on rows that the ledger requires of a run, and return it; None without noise."""
        if prepared.noise is None or prepared.row_plan is None:
            return None
        plan = self._store.ledger.plan(run, prepared.recipe, prepared.row_plan)
        prepared.federation.context.row_privacy = prepared.noise.planned({self.settings.name: plan}, run)
        return plan

    def _charge(self, prepared: Prepared, run: str, number: int, silo: Silo, shared: State) -> Charge | None:
        """Return what a round's answer costs, after a look at the budget; None without noise on rows."""
        plan, context = self._noise(prepared, run), prepared.federation.context
        if plan is None or context.row_privacy is None:
            return None
        question_digest = context.row_privacy.digest(silo, number, shared, context.state_of(silo))
        charge = Charge(question_digest, run, prepared.recipe, plan, number)
        self._store.ledger.require(charge)
        return charge

    def _check_update(self, prepared: Prepared, reply: SiloReply) -> None:
        """Refuse an update that is too large, or not finite: which of its numbers are not would tell rows."""
        if reply.norm is not None and not (reply.message and math.isfinite(reply.norm)):
            raise Diverged(f"silo {reply.silo!r}: training diverged, the update is not finite")
        if reply.message:
            self._policy.check_numbers(message_numbers(reply.message), prepared.parameters)

    def _count(self, prepared: Prepared, request: Request) -> None:
        """Record a request that the caps allow, before it is worked on."""
        marks, before = prepared.marks, prepared.before
        self._store.count(request, prepared.row_use, prepared.parameters, prepared.config.rounds, marks, before)

    def _digest(self, key: dict[str, str], run: str, base: str) -> str:
        """Return the digest by which a request is counted: with another content of its state it is another request."""
        more = {"state": self._store.state_digest(run, base)} if base else {}
        return hashlib.sha256(json.dumps(key | more, sort_keys=True).encode()).hexdigest()

    def _evaluate(
        self, federation: Federation, silo: Silo, shared: State, number: int, splits: list[str], run: str
    ) -> dict[str, Any]:
        """Score shared parts together with the silo's private ones, and return the scores that may leave."""
        federation.coordinator.adopt(shared)
        validation = score_silos(federation, "validation")
        if splits == ["validation"]:
            entry: dict[str, Any] = {"validation": validation[silo.name]}
        else:
            tested = measure_silos(federation, "test")
            entry = summary_entries(federation, tested, validation)[silo.name]
            parts = [*flatten(shared).values(), *federation.context.state_of(silo).flat().values()]
            model = sum(tensor.nbytes for tensor in parts)
            self._store.require_room(_bytes_of_test_files(silo, tested.values()) + model)
            folder = self._store.make_folder(run)
            write_test_scores(folder, federation, tested)  # for the operator: they never leave
            scores = {"rounds": federation.config.rounds, "best_round": number, "silos": {silo.name: entry}}
            write_models(folder, federation, scores)
            if silo.canaries is not None:
                charged = partial(self._store.ledger.epsilon_of, run)
                current = current_model_state(federation, silo)
                measure(federation, silo, federation.context, current, charged).write(folder)
        return filter_scores(entry, self.settings.share)

    def _silo(self, prepared: Prepared, kind: str, run: str, base: str) -> Silo:
        """Return the silo in a state from which a request may start; without a name, that before its first round."""
        silo = prepared.federation.silos[self.settings.name]
        silo.state = None
        if base and prepared.noise is not None:
            made_by = self._store.made_by(run, base, prepared.recipe)
            if not made_by or (made_by, kind) == ("final", "round"):
                raise InputError(f"state {base[:40]!r}: may have been trained without noise on rows")
        if base:
            state = SiloState.from_flat(self._store.read_state(run, base))
            if {name: tuple(t.shape) for name, t in flatten(state.private).items()} != prepared.private_shapes:
                raise InputError(f"silo {self.settings.name!r}: its state {base!r} is of another method or tuner")
            silo.state = state
        return silo


def _request_key(prepared: Prepared, request: Frame, **more: str) -> dict[str, str]:
    """Return the fields in which two requests must agree to get the same answer."""
    broadcast = hashlib.sha256(request.blobs["broadcast"]).hexdigest()
    same = {"broadcast": broadcast, "config": prepared.digest, "recipe": prepared.recipe}
    return {"kind": request.kind, **same, **more}


def _of_round(broadcast: tuple[State, int], expected: int) -> State:
    """Return the shared parts of a broadcast, which must be of the round that is asked for and counted."""
    shared, number = broadcast
    if number != expected:
        raise ProtocolError(f"a broadcast of round {number} in a request for round {expected}")
    return shared


def _bytes_of_test_files(silo: Silo, tested: Iterable[Measured]) -> int:
    """Return about how many bytes the files of the test rows take: `scores.json`, predictions, the rows' vectors."""
    vectors = {} if silo.instances is None else silo.instances[1]
    total = sum(tensor.nbytes for tensor in vectors.values())
    for measured in tested:
        answers = measured.written or []
        rows = len(answers) if measured.logits is None else len(measured.logits)
        numbers = 0 if measured.logits is None else measured.logits.numel()
        total += _ROW_BYTES * rows + 4 * numbers + sum(len(answer.encode()) for answer in answers)
    return total
