"""What an approved request has a silo do: local rounds, final phases, scores, counted against the operator's caps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from silotune.communication.messages import message_numbers, read_broadcast, with_rows
from silotune.core.tensors import State, flatten
from silotune.distributed.protocol.disclosure import filter_metrics, filter_scores
from silotune.distributed.protocol.frames import Frame, ProtocolError, require_fields, state_name
from silotune.distributed.protocol.handshake import fields_digest, text_digest
from silotune.distributed.silo.privacy_ledger import Price, PrivacyLedger
from silotune.distributed.silo.request_ledger import RequestRecord
from silotune.distributed.silo.row_fingerprint import RowRecord
from silotune.distributed.silo.setup import UNDISCLOSED_ROWS, SiloSetup
from silotune.distributed.silo.state_store import Reply, StateStore, scores_name
from silotune.errors import Diverged, InputError
from silotune.evaluation.federation_scores import measure_silos, score_silos, summary_entries
from silotune.evaluation.instance_vectors import keep_instances
from silotune.evaluation.predict import Measured
from silotune.runs.storage.scored_rows import write_test_scores
from silotune.training.client import PrivacySpent, SiloClient, SiloReply
from silotune.training.federation import Federation
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
        if kept is not None:
            return self._filtered(kept)
        silo = self._silo(federation, store, str(base))
        client = federation.client(measures=True)
        shared = self._checked(client.open_broadcast(broadcast, silo.name), int(number))
        leaving = 0 if final else sum(tensor.numel() for tensor in flatten(shared).values())
        digest = self._work_digest(key, store, str(base))
        store.require_room(4 * leaving + self._state_bytes(silo))  # before the work: its files are about as large
        record = RequestRecord(store.path.name, request.kind, int(number), digest, leaving)
        fields: dict[str, Any] = {"silo": silo.name, "round": int(number)}
        if judge:  # of the previous round, whose shared parts the broadcast holds
            self._count(federation, RequestRecord(store.path.name, "score", int(number), digest))
            fields["scores"] = self._evaluate(federation, silo, shared, ["validation"], store)
        self._count(federation, record)
        store.delete(before=int(number), keep={*map(str, keep), str(base)})  # a refused request deletes nothing
        reply, price = self._trained(client, federation, silo, record, broadcast, name)
        assert silo.state is not None, "a silo that trained has a state"
        store.write(name, silo.state.flat())
        note = "; ".join(filter(None, (changed, reply.note)))
        fields |= {"state": name, "metrics": reply.metrics, "note": note}
        about = {"norm": reply.norm, "epsilon": None if price is None else price.epsilon} if reply.message else {}
        answer = Reply(Frame("answer", fields, {"message": reply.message}), about)
        store.keep_reply(name, key, answer)
        return self._filtered(answer)

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
            PolicyRefused: the update has too many numbers.
            Diverged: the update is not finite.
        """
        ledger = PrivacyLedger(Path(self.settings.folder))
        price = None if client.privacy is None else Price.of(client.privacy)
        if record.kind == "final":
            (reply,) = client.finals([silo], broadcast)
        else:
            spent = PrivacySpent() if price is None else ledger.spent(record.run, price)
            (reply,) = client.rounds([silo], broadcast, spent)
        if reply.message:
            self._setup.policy.check_numbers(message_numbers(reply.message), federation.backbone)
            if reply.norm is not None and not math.isfinite(reply.norm):  # which numbers are not, would tell rows
                raise Diverged(f"silo {silo.name!r}: training diverged, the update is not finite")
        if reply.message and price is not None:
            ledger.record(record.run, name, price)
        return reply, price

    def _filtered(self, reply: Reply) -> Reply:
        """Keep the numbers that may leave now; a kept reply may be older than the operator's settings."""
        share = self.settings.share
        fields, blobs = dict(reply.frame.fields), dict(reply.frame.blobs)
        if "metrics" in fields:
            fields["metrics"] = filter_metrics(fields["metrics"], share)
        if "scores" in fields:
            fields["scores"] = filter_scores(fields["scores"], share)
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
            return self._filtered(kept)
        silo = self._silo(federation, store, str(base))
        shared = self._checked(read_broadcast(broadcast, federation.coordinator.expected), int(number))
        digest = self._work_digest(key, store, str(base))
        self._count(federation, RequestRecord(store.path.name, "score", int(number), digest))
        scores = self._evaluate(federation, silo, shared, splits, store)
        reply = Reply(Frame("scores", {"silo": self.settings.name, "scores": scores}))
        store.keep_reply(name, key, reply)
        return self._filtered(reply)

    def _count(self, federation: Federation, record: RequestRecord) -> None:
        """Count a request that the caps allow, before it is worked on, and record the rows that it uses."""
        before = self._setup.ledger.tally(record)
        if before is not None:  # a new one
            self._setup.policy.check_request(record.kind, record.round, record.numbers, before, federation)
            self._setup.ledger.record(record)
        self._rows.keep(record.run, self._setup.config, self._setup.rows_digest)

    def _state_bytes(self, silo: Silo) -> int:
        """Return the bytes of a silo's state: as it is, or at least those of its private parts before the first."""
        state = self._setup.federation.context.state_of(silo)
        return sum(tensor.nbytes for tensor in state.flat().values())

    def _checked(self, broadcast: tuple[State, int], asked: int) -> State:
        """Return the shared parts of a broadcast, which must be of the round that is asked for.

        The broadcast's number decides the order of rows, the request's is counted.
        """
        shared, number = broadcast
        if number != asked:
            raise ProtocolError(f"a broadcast of round {number} in a request for round {asked}")
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
