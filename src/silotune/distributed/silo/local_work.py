"""`LocalWork`: what an approved request has a silo do: local rounds, final phases, scores; counts them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from silotune.communication.messages import message_numbers, read_broadcast, with_rows
from silotune.core.tensors import State, flatten
from silotune.data.metrics import lower_is_better
from silotune.distributed.protocol.disclosure import filter_metrics, filter_scores, score_range
from silotune.distributed.protocol.frames import Frame, ProtocolError, require_fields, state_name
from silotune.distributed.protocol.handshake import fields_digest, text_digest
from silotune.distributed.silo.coarse_numbers import CoarseNumbers
from silotune.distributed.silo.limits import UpdateWithheld
from silotune.distributed.silo.own_keys import ORDER_KEY, own_key
from silotune.distributed.silo.policy import backbone_parameters
from silotune.distributed.silo.privacy_ledger import Price, PrivacyLedger
from silotune.distributed.silo.request_ledger import RequestRecord
from silotune.distributed.silo.row_fingerprint import RowRecord
from silotune.distributed.silo.score_sensitivity import rows_behind
from silotune.distributed.silo.setup import UNDISCLOSED_ROWS, SiloSetup
from silotune.distributed.silo.state_store import Reply, StateStore, scores_name, withheld_name
from silotune.errors import Diverged, InputError
from silotune.evaluation.federation_scores import measure_silos, score_silos, summary_entries
from silotune.evaluation.instance_vectors import keep_instances
from silotune.evaluation.predict import Measured
from silotune.methods.parts import Scope, names_with
from silotune.runs.storage.scored_rows import write_test_scores
from silotune.training.client import PrivacySpent, SiloClient, SiloReply
from silotune.training.federation import Federation
from silotune.training.row_influence import RowInfluence
from silotune.training.silo import Silo, SiloState

_ROW_BYTES = 64
"""Of a test row in a file of predictions, beside probabilities and answers."""


class LocalWork:
    """Trains and scores one silo, counted against its operator's limits.

    Args:
        setup: holds the operator's settings, and what the run's configuration came to.
    """

    def __init__(self, setup: SiloSetup) -> None:
        self.settings = setup.settings
        self._setup = setup
        self._rows = RowRecord(setup.settings)

    def check_rows(self, run: str) -> str:
        """Compare the rows with those that the run has used so far; returns and raises as `RowRecord.check`."""
        return self._rows.check(run, self._setup.config, self._setup.rows_digest)

    def train(self, federation: Federation, store: StateStore, request: Frame) -> Reply:
        """Run a local round or the final phases; a repeated request gets the kept reply without training again."""
        number, base, keep = require_fields(request.fields, "round", "base", "keep")
        (broadcast,) = require_fields(request.blobs, "broadcast")
        changed, final = self.check_rows(store.path.name), request.kind == "final"
        name = state_name(int(number), final)
        judge = bool(request.fields.get("judge")) and not final
        key = self._request_key(request, judge=str(judge), base=str(base))
        kept = store.find_reply(name, key)
        if kept is None and self._setup.policy.limits.effective_rows:  # it may have been lifted since
            kept = store.find_reply(withheld_name(int(number)), key)
        if kept is not None:
            return self._filtered(kept, key)
        silo = self._silo(federation, store, str(base))
        client = federation.client(measures=True)
        shared = self._checked(client.open_broadcast(broadcast, silo.name), int(number))
        leaving = 0 if final else sum(tensor.numel() for tensor in flatten(shared).values())
        digest = self._work_digest(key, store, str(base))
        store.require_room(4 * leaving + self._state_bytes(silo))  # before the work: its files are about as large
        record = RequestRecord(store.path.name, request.kind, int(number), digest, leaving)
        fields: dict[str, Any] = {"silo": silo.name, "round": int(number)}
        if judge:  # of the previous round, whose shared parts the broadcast holds
            judged = RequestRecord(store.path.name, "score", int(number), digest)
            self._count(federation, judged)
            with self._setup.limits.failures_counted(judged):
                fields["scores"] = self._evaluate(federation, silo, shared, ["validation"], store)
        try:
            self._count(federation, record)
            store.delete(before=int(number), keep={*map(str, keep), str(base)})  # a refused request deletes nothing
            reply, price = self._trained(client, federation, silo, record, broadcast, name)
        except UpdateWithheld as refusal:
            name, answer = withheld_name(int(number)), Reply(Frame("withheld", fields | {"reason": str(refusal)}))
        else:
            assert silo.state is not None, "a silo that trained has a state"
            store.write(name, silo.state.flat())
            note = "; ".join(filter(None, (changed, reply.note)))
            fields |= {"state": name, "metrics": reply.metrics, "note": note}
            about = {"norm": reply.norm, "epsilon": None if price is None else price.epsilon} if reply.message else {}
            answer = Reply(Frame("answer", fields, {"message": reply.message}), about)
        store.keep_reply(name, key, answer)
        return self._filtered(answer, key)

    def _trained(
        self,
        client: SiloClient,
        federation: Federation,
        silo: Silo,
        record: RequestRecord,
        broadcast: bytes,
        name: str,
    ) -> tuple[SiloReply, Price | None]:
        """Run a silo's local round or final phases; returns its reply, which may leave, and the price of its noise.

        The price is in the ledger by then, under the name of the silo's new state.

        Raises:
            UpdateWithheld: too few rows are behind the update.
            PolicyRefused, Diverged: as `_check_update`.
        """
        ledger = PrivacyLedger(Path(self.settings.folder))
        price = None if client.privacy is None else Price.of(client.privacy)
        with self._setup.limits.failures_counted(record):
            if record.kind == "final":
                (reply,) = client.finals([silo], broadcast)
            else:
                spent = PrivacySpent() if price is None else ledger.spent(record.run, price)
                with self._watched(federation, record, noised=price is not None):
                    (reply,) = client.rounds([silo], broadcast, spent)
            if reply.message:
                self._check_update(federation, silo, reply, noised=price is not None)
        if reply.message and price is not None:
            ledger.record(record.run, name, price)
        return reply, price

    def _check_update(self, federation: Federation, silo: Silo, reply: SiloReply, noised: bool) -> None:
        """Judge an update before it leaves; raises what the policy raises, and `Diverged` where it is not finite."""
        policy = self._setup.policy
        policy.check_skipped(federation.context, silo, int(reply.metrics.get("skipped_steps") or 0), noised)
        policy.check_numbers(message_numbers(reply.message), federation.backbone)
        if reply.norm is not None and not math.isfinite(reply.norm):  # which numbers are not, would tell rows
            raise Diverged(f"silo {silo.name!r}: training diverged, the update is not finite")

    @contextmanager
    def _watched(self, federation: Federation, record: RequestRecord, noised: bool) -> Iterator[None]:
        """Withhold what is trained inside if too few rows are behind it; noise hides each of them already."""
        limits, context = self._setup.limits, federation.context
        if noised or not limits.policy.limits.effective_rows:
            yield
            return
        context.influence = RowInfluence(names_with(context.parts, Scope.SHARED))
        try:
            yield
            limits.withhold(record, context.influence.effective_rows(), context.influence.rows_of_steps())
        finally:
            context.influence = None

    def _filtered(self, reply: Reply, key: dict[str, str]) -> Reply:
        """Keep the numbers that may leave now, rounded; a kept reply may be older than the operator's settings."""
        share = self.settings.share
        coarse = self._coarse(fields_digest(key), noised=bool(reply.frame.fields.get("scores")))
        fields, blobs = dict(reply.frame.fields), dict(reply.frame.blobs)
        if "metrics" in fields:
            fields["metrics"] = coarse.metrics(filter_metrics(fields["metrics"], share))
        if "scores" in fields:
            fields["scores"] = coarse.scores(filter_scores(fields["scores"], share))
        if "rows" not in share and blobs.get("message"):
            blobs["message"] = with_rows(blobs["message"], UNDISCLOSED_ROWS)
        return replace(reply, frame=Frame(reply.frame.kind, fields, blobs))

    def score(self, federation: Federation, store: StateStore, request: Frame) -> Reply:
        """Score the aggregated shared parts with this silo's private ones; computed once, as `train`."""
        number, base, splits = require_fields(request.fields, "round", "base", "splits")
        (broadcast,) = require_fields(request.blobs, "broadcast")
        self.check_rows(store.path.name)
        name, splits = scores_name(int(number)), [str(split) for split in splits]
        if splits not in (["validation"], ["validation", "test"]):
            raise ProtocolError(f"no such splits to score: {splits!r:.60}")
        key = self._request_key(request, base=str(base), splits=",".join(splits), share=",".join(self.settings.share))
        kept = store.find_reply(name, key)
        if kept is not None:
            return self._filtered(kept, key)
        silo = self._silo(federation, store, str(base))
        shared = self._checked(read_broadcast(broadcast, federation.coordinator.expected), int(number))
        digest = self._work_digest(key, store, str(base))
        counted = RequestRecord(store.path.name, "score", int(number), digest)
        self._count(federation, counted)
        with self._setup.limits.failures_counted(counted):
            scores = self._evaluate(federation, silo, shared, splits, store)
        reply = Reply(Frame("scores", {"silo": self.settings.name, "scores": scores}))
        store.keep_reply(name, key, reply)
        return self._filtered(reply, key)

    def _coarse(self, request: str, noised: bool) -> CoarseNumbers:
        """Return how numbers are made coarse before they leave in reply to a request with this digest."""
        federation, limits = self._setup.federation, self.settings.policy
        silo = federation.silos[self.settings.name]
        (evaluation,) = silo.evaluations.values()
        rows = {"train": sum(map(len, silo.train.values()))}
        rows |= {split: len(getattr(evaluation, split)) for split in ("validation", "test")}
        noise = limits.score_noise if noised else 0.0
        key = own_key(Path(self.settings.folder), ORDER_KEY) if noise else b""
        metrics = {task.metric for task in federation.tasks.values()}
        losses = {"validation", "test"} if any(map(lower_is_better, metrics)) else set()
        if federation.config.validates_by_loss:
            losses.add("validation")
        task = federation.tasks[silo.name]
        behind = {split: rows_behind(task, getattr(evaluation, split).labels) for split in {*rows} - {"train", *losses}}
        drawn_for, least = (int.from_bytes(key, "big"), request), score_range(metrics)[0]
        return CoarseNumbers(limits.score_digits, rows, losses, noise, behind, drawn_for, least)

    def _count(self, federation: Federation, record: RequestRecord) -> None:
        """Count a request before it is worked on, and record the rows that it uses."""
        self._setup.limits.check_withheld(record)
        self._setup.limits.record_use(self._setup.row_use)
        self._setup.limits.admit(record, federation.config, backbone_parameters(federation.backbone))
        self._rows.keep(record.run, self._setup.config, self._setup.rows_digest)

    def _state_bytes(self, silo: Silo) -> int:
        """Return the bytes of a silo's state: as it is, or at least those of its private parts before the first."""
        state = self._setup.federation.context.state_of(silo)
        return sum(tensor.nbytes for tensor in state.flat().values())

    def _checked(self, broadcast: tuple[State, int], asked: int) -> State:
        """Return the shared parts of a broadcast that the policy allows, and that is of the round that is asked for.

        The broadcast's number decides the order of rows, the request's is counted.
        """
        shared, number = broadcast
        if number != asked:
            raise ProtocolError(f"a broadcast of round {number} in a request for round {asked}")
        self._setup.policy.check_broadcast(shared, self._setup.start)
        return shared

    def _work_digest(self, key: dict[str, str], store: StateStore, base: str) -> str:
        """Return the digest by which a request is counted: with another content of its state it is another request."""
        return fields_digest({**key, "state": store.digest(base)} if base else key)

    def _request_key(self, request: Frame, **more: str) -> dict[str, str]:
        """Return the fields in which two requests must agree to get the same reply."""
        return {
            "kind": request.kind,
            "broadcast": hashlib.sha256(request.blobs["broadcast"]).hexdigest(),
            "config": text_digest(self._setup.text),
            **more,
        }

    def _evaluate(
        self, federation: Federation, silo: Silo, shared: State, splits: list[str], store: StateStore
    ) -> dict[str, Any]:
        """Score shared parts with the silo's present private ones; returns what may leave."""
        federation.coordinator.adopt(shared)
        if splits == ["validation"]:
            entry: dict[str, Any] = {"validation": score_silos(federation, "validation")[self.settings.name]}
        else:
            tested = measure_silos(federation, "test")
            entry = summary_entries(federation, tested)[self.settings.name]
            store.require_room(_bytes_of_test_files(silo, tested.values()))
            store.make()
            keep_instances(store.path, [silo])
            write_test_scores(store.path, federation, tested)  # for the operator: they never leave
        return filter_scores(entry, self.settings.share)

    def _silo(self, federation: Federation, store: StateStore, base: str) -> Silo:
        """Return the silo at one of its states; the empty name stands for the state before its first round."""
        silo = federation.silos[self.settings.name]
        silo.state = None
        if base:
            kept = SiloState.from_flat(store.read(base))
            wanted = {name: tensor.shape for name, tensor in flatten(federation.context.state_of(silo).private).items()}
            if {name: tensor.shape for name, tensor in flatten(kept.private).items()} != wanted:
                raise InputError(f"silo {self.settings.name!r}: its state {base!r} is of another method or tuner")
            silo.state = kept
        return silo


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
